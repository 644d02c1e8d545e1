"""Hang detection in the agent: one watch per attempt, while its ranks run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from gpulaunch.launcher.agent.account import Account
from gpulaunch.launcher.agent.group import Group
from gpulaunch.launcher.agent.surroundings import Surroundings
from gpulaunch.launcher.hang.door import HangWatch
from gpulaunch.launcher.hang.values import Limits, Verdict
from gpulaunch.launcher.job.spec import JobSpec


def _limits(spec: JobSpec) -> Limits:
    """A cap below what a look needs to be sure hurries the look: the verdict must not come before its evidence."""
    usual = Limits()
    return Limits(
        cap_s=spec.hang_timeout_s,
        first_step_s=spec.first_step_timeout_s,
        floor_s=min(usual.floor_s, spec.hang_timeout_s / 2),
    )


class Hangs:
    """Watches one attempt after another."""

    def __init__(
        self, around: Surroundings, *, account: Account, say: Callable[[str], None], on_hang: Callable[[], None]
    ) -> None:
        """`on_hang`: the ranks hang, and the user wants something done about it."""
        self._around = around
        self._account = account
        self._say = say
        self._on_hang = on_hang
        self._watch: HangWatch | None = None
        self._group: Group | None = None
        self.times_s: tuple[float, float] | None = None
        """Of the attempt that hung: when its ranks last moved, and when that was judged to be a hang."""

    @property
    def pids(self) -> frozenset[int]:
        """The helper that looks into the ranks, while there is one."""
        return self._watch.helper_pids() if self._watch is not None else frozenset()

    def begin(self, group: Group, attempt: int) -> None:
        """The ranks of an attempt run."""
        spec, around = self._around.spec, self._around
        self.stop()
        if spec.hang_timeout_s <= 0:
            return
        self._group = group
        pages = around.pages
        self._watch = HangWatch(
            around.loop,
            _limits(spec),
            {group.rank_of(local_rank): pid for local_rank, pid in group.live.items()},
            pages.read if pages is not None else lambda _: None,
            lambda rank: around.rundir.rank_path(attempt, rank),
            self._suspected,
            self._hung,
            path=os.path.join(around.rundir.attempt_dir(attempt), "hang.json"),
            whole=spec.nnodes == 1,
        )
        self._watch.start()

    def ended(self, rank: int) -> None:
        """A rank has ended: it is not waited for."""
        if self._watch is not None:
            self._watch.ended(rank)

    def stop(self) -> None:
        """The ranks are being stopped, or have ended."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _suspected(self, sentence: str) -> None:
        self._account.hang_suspicions += 1
        self._account.write()
        self._around.rundir.event("hang_suspected", why=sentence)

    def _hung(self, verdict: Verdict) -> None:
        assert self._group is not None, "a group is watched"
        self._account.hangs += 1
        self._account.write()
        self._around.rundir.event("hung", why=verdict.sentence, rule=verdict.rule, odd=verdict.odd, path=verdict.path)
        self._say(f"the ranks hang: {verdict.sentence}")
        if verdict.path:
            self._say(f"the stacks of all ranks: {verdict.path}")
        if self._around.spec.on_hang == "report":
            self._say("nothing is done about it (--on-hang report)")
            return
        ranks = verdict.odd or tuple(map(self._group.rank_of, self._group.live))
        self.times_s = self._last_moved_s(ranks), self._around.loop.now()
        self._group.mark_hung(ranks, verdict.sentence)
        self._on_hang()

    def _last_moved_s(self, ranks: Iterable[int]) -> float:
        pages = self._around.pages
        read = [pages.read(rank) for rank in ranks] if pages is not None else []
        moved_s = [page.last_edge_ns / 1e9 for page in read if page is not None and page.last_edge_ns]
        return min(moved_s, default=self._around.loop.now())
