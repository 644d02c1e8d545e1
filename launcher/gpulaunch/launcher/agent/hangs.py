"""Hang detection in the agent: one watch per attempt, while its ranks run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from gpulaunch.launcher.agent.goodput_tracker import GoodputTracker
from gpulaunch.launcher.agent.rank_group import RankGroup
from gpulaunch.launcher.agent.run_context import RunContext
from gpulaunch.launcher.hang.detector import HangDetector, mark_over
from gpulaunch.launcher.hang.values import Limits, Verdict, spans
from gpulaunch.launcher.job.spec import JobSpec
from gpulaunch.launcher.policy.goodput import duration
from gpulaunch.launcher.rendezvous.base import Rendezvous


def _limits(spec: JobSpec) -> Limits:
    """With a short user timeout the checks begin early enough to be sure by then, and the stall is reported before."""
    usual = Limits()
    return Limits(
        timeout_s=spec.hang_timeout_s,
        first_step_s=spec.first_step_timeout_s,
        floor_s=min(usual.floor_s, spec.hang_timeout_s / 2),
        settle_s=min(usual.settle_s, spec.hang_timeout_s / 4),
    )


class HangMonitor:
    """Watches the attempts one after another."""

    def __init__(
        self,
        context: RunContext,
        rendezvous: Rendezvous,
        *,
        goodput: GoodputTracker,
        say: Callable[[str], None],
        on_hang: Callable[[], None],
    ) -> None:
        """`on_hang`: the ranks hang, and the user wants an action for it."""
        self._context = context
        self._rendezvous = rendezvous
        self._goodput = goodput
        self._say = say
        self._on_hang = on_hang
        self._watch: HangDetector | None = None
        self._group: RankGroup | None = None
        self._path = ""
        self.times_s: tuple[float, float] | None = None
        """Of the attempt that hung: when its ranks last moved, and when that was judged to be a hang."""
        self.finished = False
        """It hung in its teardown, after all of its work was done."""

    @property
    def pids(self) -> frozenset[int]:
        """The helper that inspects the ranks, while it runs."""
        return self._watch.helper_pids() if self._watch is not None else frozenset()

    def begin(self, group: RankGroup, attempt: int, *, whole: bool) -> None:
        """The ranks of an attempt are running; `whole`: they are all of the job."""
        spec, context = self._context.spec, self._context
        self.stop()
        if spec.hang_timeout_s <= 0:
            return
        self._group = group
        self._path = os.path.join(context.rundir.attempt_dir(attempt), "hang.json")
        segments = context.segments
        self._watch = HangDetector(
            context.loop,
            _limits(spec),
            {group.rank_of(local_rank): pid for local_rank, pid in group.live.items()},
            segments.read if segments is not None else lambda _: None,
            lambda rank: context.rundir.rank_path(attempt, rank),
            self._late,
            self._over,
            self._hung,
            path=self._path,
            whole=whole,
            store_pid=lambda: group.store_pid,
            on_idle=self._rendezvous.idle,
            others_idle_s=self._rendezvous.others_idle_s,
        )
        self._watch.start()

    def ended(self, rank: int) -> None:
        """A rank has ended: no longer wait for it."""
        if self._watch is not None:
            self._watch.ended(rank)

    def stop(self) -> None:
        """The ranks are being stopped, or have ended."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
            self._goodput.stall = None

    def _late(self, verdict: Verdict) -> None:
        """Report a stall: it may be over in a moment."""
        first = self._goodput.stall is None
        self._goodput.hang_suspicions += first
        self._tell_the_page(verdict)
        self._context.rundir.event(
            "hang_suspected",
            why=verdict.sentence,
            ranks=verdict.odd,
            quiet_s=round(verdict.quiet_s, 1),
            due_in_s=verdict.due_in_s and round(verdict.due_in_s, 1),
            again=not first,
        )
        self._say(f"{verdict.sentence}: no progress for {duration(verdict.quiet_s)}; {self._follows(verdict)}")
        if first and verdict.path:
            self._say(f"the stacks of all ranks: {verdict.path}")

    def _follows(self, verdict: Verdict) -> str:
        if self._context.spec.on_hang == "report":
            return "no action will be taken (--on-hang report)"
        if verdict.due_in_s is None:
            return "no action is taken: this may be normal"
        return f"acts in {duration(verdict.due_in_s)}; {verdict.due_by or 'the GIL is held without using the CPU'}"

    def _over(self, ranks: Sequence[int], after_s: float) -> None:
        """Report that the stall is over."""
        self._goodput.stall = None
        self._goodput.write()
        self._context.rundir.event("hang_over", ranks=ranks, after_s=round(after_s, 1))
        if ranks:  # otherwise the reported ranks have ended in that state
            mark_over(self._path, after_s)
            who, move = (f"rank {ranks[0]}", "moves") if len(ranks) == 1 else (f"ranks {spans(ranks)}", "move")
            self._say(f"{who} {move} again after {duration(after_s)}")

    def _hung(self, verdict: Verdict) -> None:
        assert self._group is not None, "a group is watched"
        self._goodput.hangs += 1
        self._tell_the_page(verdict)
        self._context.rundir.event("hung", why=verdict.sentence, rule=verdict.rule, odd=verdict.odd, path=verdict.path)
        for_s = f": no progress for {duration(verdict.quiet_s)}" if verdict.rule == "timeout" else ""
        self._say(f"the ranks hang: {verdict.sentence}{for_s}")
        if verdict.path:
            self._say(f"the stacks of all ranks: {verdict.path}")
        if self._context.spec.on_hang == "report":
            self._say("no action is taken (--on-hang report)")
            return
        ranks = verdict.odd or tuple(map(self._group.rank_of, self._group.live))
        last_s, now_s = self._last_moved_s(ranks), self._context.loop.now()
        # A program that has finished has lost nothing: what follows is its end, not failure detection time. It is
        # not restarted, which might repeat all of its work. But code after that point (a last save, an upload)
        # may not have run, so it is no success either.
        self.finished = verdict.rule == "teardown"
        self.times_s = (last_s, last_s if self.finished else now_s)
        self._group.mark_hung(ranks, verdict.sentence)
        self._on_hang()

    def _tell_the_page(self, verdict: Verdict) -> None:
        """Update what the segment, the metrics and `top` show until it is over."""
        now_s = self._context.loop.now()
        self._goodput.stall = {
            "ranks": list(verdict.odd) or sorted(rank for group in verdict.groups for rank in group.ranks),
            "since_s": now_s - verdict.quiet_s,
            "due_s": None if verdict.due_in_s is None else now_s + verdict.due_in_s,
            "what": verdict.sentence,
        }
        self._goodput.write()

    def _last_moved_s(self, ranks: Iterable[int]) -> float:
        segments = self._context.segments
        read = [segments.read(rank) for rank in ranks] if segments is not None else []
        moved_s = [segment.last_edge_ns / 1e9 for segment in read if segment is not None and segment.last_edge_ns]
        return min(moved_s, default=self._context.loop.now())
