"""The agent: turns the loop's reports into events, calls `state.step`, and executes the actions. It decides nothing."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpulaunch.launcher.agent import cleanup, events, outcome, state, summary
from gpulaunch.launcher.agent.cleanup import CLEAR_S, LeftoverPolicy
from gpulaunch.launcher.agent.goodput_tracker import GoodputTracker
from gpulaunch.launcher.agent.hangs import HangMonitor
from gpulaunch.launcher.agent.rank_group import GroupEvents, RankGroup
from gpulaunch.launcher.agent.recovery import Recovery
from gpulaunch.launcher.agent.run_context import RunContext
from gpulaunch.launcher.agent.sidecar import SidecarProcess
from gpulaunch.launcher.agent.signals import Signals
from gpulaunch.launcher.agent.starter import Starter, StarterEvents
from gpulaunch.launcher.agent.status_writer import StatusWriter
from gpulaunch.launcher.agent.timers import FileTimers
from gpulaunch.launcher.checkpoint.find import Checkpoint
from gpulaunch.launcher.failure.blame import Blame, exit_code, failed_at_s
from gpulaunch.launcher.failure.causes import Cause, Tier
from gpulaunch.launcher.failure.classify import ADVICE, Kind, classify
from gpulaunch.launcher.failure.ends import RankEnd, signal_name
from gpulaunch.launcher.job.host_info import Gpu
from gpulaunch.launcher.job.imports import Reading
from gpulaunch.launcher.logs.console import Console
from gpulaunch.launcher.loop import linux
from gpulaunch.launcher.loop.loop import Exit, Timer
from gpulaunch.launcher.loop.orphan_reaper import OrphanReaper
from gpulaunch.launcher.policy.restart import REQUEUE, Decision, signature
from gpulaunch.launcher.rendezvous.base import Rendezvous, World
from gpulaunch.launcher.rendezvous.plan import Offer
from gpulaunch.profiler.channel.control import ControlWriter
from gpulaunch.profiler.channel.ending import SIDECAR_ENDS_S

_LEAVE_S = 10.0
"""How long the leader of a job of several nodes waits until the others know that it is over."""
_HELPERS_S = 1.0
"""How long all helpers except the sidecar may take to exit at the end of the job."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the job ended: the exit code, and what was to blame, if anything."""

    code: int
    blame: Blame | None
    error: str
    """Why it could not be started or continued, if no rank is to blame."""
    stopped_by: str
    """The name of the signal that ended it, or ""."""


class Agent:
    """One job on one node, from the first attempt to the exit code."""

    def __init__(
        self,
        context: RunContext,
        *,
        console: Console,
        rendezvous: Rendezvous,
        sidecar: SidecarProcess | None,
        orphan_reaper: OrphanReaper,
        report: Callable[[Blame | None, int, bool, str, str], None],
        reading: Reading,
        spawn_because: str,
        gpus: tuple[Gpu, ...],
        began_s: float,
        control: ControlWriter,
    ) -> None:
        """What one job needs.

        `report(blame, attempt, restarting, why, elsewhere)` writes and shows a failure; `spawn_because`: why not to
        fork, or ""; `gpus`: the GPUs that the ranks may see; `began_s`: when the launcher was called, by the loop's
        clock; `control`: the segment from which the ranks read the agent's requests.
        """
        self._context = context
        self._loop = context.loop
        self._spec = context.spec
        self._console = console
        self._rendezvous = rendezvous
        self._sidecar = sidecar
        self._orphan_reaper = orphan_reaper
        self._report = report
        self._starter = Starter(
            context,
            say=console.say,
            reading=reading,
            spawn_because=spawn_because,
            events=StarterEvents(
                start_failed=lambda ranks, why: self._start_failed(ranks, why, False),
                no_store=self._without_store,
            ),
            on_pid=lambda: self._status_writer.publish(),
        )
        self._recovery = Recovery(context, gpus=gpus, say=console.say)
        self._first_end_s = 0.0
        self._decision: Decision | None = None
        self._resumable = False
        self._node_lost = False
        self._saved = False
        """Whether a rank's exit code says that it has saved."""
        self._state, self._first = state.first(
            restarts=self._spec.max_restarts if self._spec.nnodes == 1 else _DECIDED_BY_PLAN,
            grace_s=self._spec.grace_s,
            failure_grace_s=self._spec.failure_grace_s,
        )
        self._group: RankGroup | None = None
        self._world: World | None = None
        self._deadline: Timer | None = None
        self._blame: Blame | None = None
        self._error = ""
        self._peer_error = ""
        self._told_s: float | None = None
        """When the ranks were told to end because of another node."""
        self._elsewhere = ""
        """What failed first, on another node."""
        self._awaits_verdict = False
        self._outcome = events.Outcome.OPEN
        self.goodput = GoodputTracker(context, began_s=began_s)
        self._hangs = HangMonitor(
            context,
            rendezvous,
            goodput=self.goodput,
            say=console.say,
            on_hang=lambda: self._happened(events.Hung(final=self._spec.on_hang == "stop" or self._hangs.finished)),
        )
        self._status_writer = StatusWriter(
            context,
            goodput=self.goodput,
            say=console.say,
            group=lambda: self._group,
            helpers=lambda: {
                "fork_server_pid": self._starter.pid,
                "sidecar_pid": sidecar.pid if sidecar is not None else None,
            },
        )
        if sidecar is not None:
            sidecar.on_pid = self._status_writer.publish
        self._signals = Signals(
            context,
            control=control,
            say=console.say,
            state=lambda: self._state,
            group=lambda: self._group,
            listening=self._status_writer.listening,
            happened=self._happened,
        )
        path = context.timer_file
        self._timers = FileTimers(self._loop, path, self._timer_expired) if path else None
        self.totals: dict[int, summary.RankTotals] = {}
        rendezvous.on_joined = self._joined
        rendezvous.on_failed = self._join_failed
        rendezvous.on_peer_failed = self._peer_failed
        rendezvous.on_fenced = self._fenced
        rendezvous.on_node_lost = self._lose_node
        rendezvous.on_peers_done = lambda: self._happened(events.PeersDone())
        rendezvous.on_peer_preempted = self._peer_preempted
        rendezvous.on_saves = self._saves
        rendezvous.on_judged = self._judged
        rendezvous.on_over = self._over

    @property
    def num_restarts(self) -> int:
        """How often the ranks were restarted."""
        return self._attempt

    @property
    def node_rank(self) -> int:
        """Of the last attempt."""
        return self._world.node_rank if self._world is not None else self._spec.node_rank

    @property
    def _attempt(self) -> int:
        """The present or last one; a node that came late has not taken part in the first."""
        return self._world.attempt if self._world is not None else self._state.attempt

    def start_server(self) -> None:
        """Start the fork server before anything else: everything waits for `import torch`."""
        self._starter.start_server()

    def run(self) -> Ended:
        """Run the loop until the job has ended."""
        self._loop.watch_pid(self._orphan_reaper.pid, self._orphan_reaper_lost)
        self._do(self._first)
        self._status_writer.begin()
        self._loop.run()
        end = self._job_end()
        return Ended(
            code=end.exit_code,
            blame=self._blame,
            error=self._error or self._peer_error,
            stopped_by=end.stopped_by,
        )

    def close(self) -> None:
        """End everything this agent started, in any state, in bounded time."""
        helpers = self._helpers()
        if self._timers is not None:
            self._timers.close()
        self._starter.close()
        if self._group is not None:
            self._group.kill()
        self._turn_until(self._rendezvous.leave, _LEAVE_S)
        self._rendezvous.close()
        self._recovery.cancel()
        end_s = SIDECAR_ENDS_S - _HELPERS_S
        if self._sidecar is not None:
            self._sidecar.close()
            end_s += self._sidecar.end_s
        # The helpers were asked to exit. After a moment those still running are killed like any leftover process. The
        # sidecar still has something to write; it has exited when its `pid` is None.
        self._turn_until(lambda: not self._helpers() & frozenset(linux.children_of(os.getpid())), _HELPERS_S)
        self._turn_until(lambda: self._sidecar is None or self._sidecar.pid is None, end_s)
        if self._outcome is events.Outcome.SUCCESS:  # nothing is left running, except on purpose
            for helper in helpers & frozenset(linux.children_of(os.getpid())):
                for pid in (helper, *linux.descendants_of(helper)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            return
        cleared: list[list[int]] = []
        group = self._group or RankGroup(self._context, _NO_WORLD, self._group_events(), agent_store=False)
        group.when_cleared(cleared.append)
        group.clear(frozenset({self._orphan_reaper.pid}), LeftoverPolicy.KILL)
        self._turn_until(lambda: bool(cleared), 2 * CLEAR_S)

    def _turn_until(self, done: Callable[[], bool], within_s: float) -> None:
        until_s = self._loop.now() + within_s
        while not done() and self._loop.now() < until_s:
            self._loop.turn(until_s - self._loop.now())

    def _orphan_reaper_lost(self, exit_: Exit) -> None:
        self._context.rundir.event("keeper_lost", pid=exit_.pid)
        self._orphan_reaper.start()
        self._loop.watch_pid(self._orphan_reaper.pid, self._orphan_reaper_lost)

    # -- events

    def _happened(self, event: events.Event) -> None:
        if isinstance(event, events.Signalled) and self._state.phase is events.Phase.DONE:
            self._recovery.cancel()  # no rank runs any more: do not delay the exit with the last search
            self._finished(None)
            return
        before = self._state.phase
        self._state, actions = state.step(self._state, event)
        if self._state.phase is not before:
            if self._state.phase not in (events.Phase.STARTING, events.Phase.RUNNING):
                self._starter.cancel()
                self._hangs.stop()
            self.goodput.preempted = self._state.preempted
            self._context.rundir.event("phase", phase=self._state.phase.value, attempt=self._state.attempt)
        self._do(actions)
        if self._awaits_verdict and self._state.final and self._state.signum:
            # Asked to end: the verdict changes nothing, and the others are told.
            self._rendezvous.failed(replace(self._cause(), final=True, preempted=self._state.preempted))
            self._judged(Decision(again=True, wait_s=0.0, charged=False, why="", code=None), "")

    def _joined(self, world: World) -> None:
        self._world = world
        self._happened(events.Joined())

    def _join_failed(self, why: str) -> None:
        self._error = why
        self._happened(events.StartFailed())

    def _over(self, decision: Decision, why: str) -> None:
        """The job has ended, or is out of reach, while this node takes no part in it."""
        self._error = why
        self._decision = decision
        self._happened(events.StartFailed(final=True))

    def _peer_failed(self, final: bool, why: str) -> None:
        self._told_s = self._told_s or self._loop.now()
        self._peer_error = why
        self._console.say(why)
        self._happened(events.PeerFailed(final=final))

    def _fenced(self, why: str) -> None:
        self._told_s = self._told_s or self._loop.now()
        self._peer_error = why
        self._console.say(why)
        self._happened(events.PeerFailed(fenced=True))

    def _lose_node(self, why: str) -> None:
        self._node_lost = True
        self._peer_failed(True, f"{why}; {ADVICE[Kind.NODE_LOSS]}")

    def _peer_preempted(self, why: str) -> None:
        self._console.say(f"{why}: asked the ranks of this node to save and end")
        self._happened(events.PeerPreempted())

    def _saves(self, why: str) -> None:
        self._told_s = self._told_s or self._loop.now()
        self._peer_error = why
        self._console.say(why)
        self._happened(events.PeerFailed(saves=True))

    def _without_store(self, why: str) -> None:
        self._error = why
        self._happened(events.StoreLost())

    def _start_failed(self, ranks: frozenset[int], why: str, final: bool) -> None:
        self._error = why
        self._happened(events.StartFailed(ranks=ranks, final=final))

    def _rank_ended(self, local_rank: int, end: RankEnd, exit_: Exit) -> None:
        segments = self._context.segments
        segment = segments.read(end.rank) if segments is not None else None
        self.totals.setdefault(end.rank, summary.RankTotals()).add(segment, exit_.max_rss_bytes)
        self._recovery.rank_ended(end.pid, segment)
        self._hangs.ended(end.rank)
        if segment is not None:
            self.goodput.update([segment])
        self._saved = self._saved or end.code == REQUEUE
        if end.code != 0:
            self._first_end_s = self._first_end_s or end.at_s
        self._context.rundir.event(
            "rank_ended",
            seen_s=end.at_s,
            rank=end.rank,
            pid=end.pid,
            code=end.code,
            signal=end.signal,
            attempt=self._attempt,
            stopped=end.stopped,
        )
        ok = end.code == 0
        # A job manager may signal every process of the job: the ranks' exit then arrives before our own signal.
        notice = end.signal is not None and signal_name(end.signal) in self._spec.preempt_signals
        echo = not ok and (notice or classify(end) is Kind.PEER)
        self._happened(events.RankEnded(local_rank=local_rank, ok=ok, echo=echo))

    def _timer_expired(self, pid: int, signum: int, scope: str) -> None:
        said = self._group.timer_expired(pid, signum, scope) if self._group is not None else ""
        if said:
            self._context.rundir.event("timer_expired", pid=pid, signal=signum, scope=scope)
            self._console.say(said)

    def _store_lost(self, exit_: Exit) -> None:
        how_ended = f"was killed by {signal_name(exit_.signal)}" if exit_.signal else f"ended with code {exit_.code}"
        self._context.rundir.event("store_lost", pid=exit_.pid, how=how_ended, attempt=self._attempt)
        self._error = f"the ranks' store (pid {exit_.pid}) {how_ended}; the ranks would wait for it forever"
        self._console.say(self._error)
        self._happened(events.StoreLost())

    # -- actions

    def _do(self, actions: tuple[events.Action, ...]) -> None:
        for action in actions:
            match action:
                case events.Join():
                    self._prepare(action.attempt)
                case events.Start():
                    self._start()
                case events.Notice():
                    self._signals.notice(action)
                case events.Stop():
                    self._signals.stop(action.signum)
                case events.Kill():
                    if self._group is not None:
                        self._group.kill()
                case events.Arm():
                    self._arm(action)
                case events.Disarm():
                    self._disarm()
                case events.Clear():
                    self._clear(gently=action.gently)
                case events.TellPeers():
                    self._tell_peers(action)
                case events.Report():
                    self._report_failure(restarting=action.restarting)
                    if action.restarting:
                        self._forget_attempt()
                case events.Finish():
                    self._outcome = action.outcome
                    self._finish()

    def _prepare(self, attempt: int) -> None:
        self._rendezvous.open()
        self._recovery.prepare(attempt, lambda offers: self._prepared(attempt, offers), self._join_failed)

    def _prepared(self, attempt: int, offers: tuple[Offer, ...]) -> None:
        if self._state.phase is events.Phase.JOINING and self._state.attempt == attempt:
            self._rendezvous.join(attempt, offers)

    def _finish(self) -> None:
        """Leave the loop, but first look for the checkpoint that the job could be resumed from."""
        self._recovery.find_final(self._finished, ok=self._outcome is events.Outcome.SUCCESS)

    def _finished(self, newest: Checkpoint | None) -> None:
        self._resumable = newest is not None or self._saved
        end = self._job_end()
        if self._state.preempted and end.stopped_by:
            self._console.say(outcome.preempted_line(newest, end.exit_code))
        ok = self._outcome is events.Outcome.SUCCESS
        self.goodput.ended(ok=ok, newest=newest, all_done=self._hangs.finished)
        self._loop.stop()

    def _start(self) -> None:
        assert self._world is not None, "started before it was joined"
        spec, context, world = self._spec, self._context, self._world
        self._error = self._peer_error = ""
        self._blame = None
        self._decision = None
        resume = self._recovery.choose(world.resume, node_rank=world.node_rank, nnodes=world.nnodes)
        self._recovery.began()
        self._first_end_s = 0.0
        if self._timers is not None:
            self._timers.clear()
        self._hangs.times_s, self._hangs.finished = None, False
        self._signals.attempt_began(self.goodput.captured_s)
        self.goodput.attempt_began(world.attempt, self._recovery.resumed)
        if context.segments is not None:
            try:
                context.segments.prepare(
                    [(world.first_rank + local_rank, local_rank) for local_rank in range(spec.nproc)], world.attempt
                )
            except OSError as err:
                self._console.say(f"no profile of this attempt: no space for shared-memory segments: {err.strerror}")
        self._group = RankGroup(
            context,
            world,
            self._group_events(),
            agent_store=self._starter.agent_store,
            resume_from=resume.path,
            resume_args=resume.args,
            resume_named=resume.named,
            visible_devices=self._recovery.visible_devices,
        )
        self._starter.start(self._group)

    def _group_events(self) -> GroupEvents:
        return GroupEvents(
            started=self._ranks_started,
            start_failed=self._start_failed,
            rank_ended=self._rank_ended,
            cleared=self._group_cleared,
            started_again=self._starter.started_again,
            store_lost=self._store_lost,
            left_running=self._left_running,
        )

    def _ranks_started(self, ranks: frozenset[int]) -> None:
        world = self._world
        assert world is not None, "started before it was joined"
        facts = {
            "job": world.job,
            "generation": world.generation,
            "nnodes": world.nnodes,
            "world_size": world.world_size,
        }
        group = facts if world.job else {}
        pids = dict(self._group.live) if self._group else {}
        self._context.rundir.event("started", attempt=self._attempt, pids=pids, **group)
        self._status_writer.publish()
        self.goodput.attempt_started()
        self._happened(events.Started(ranks=ranks))
        if self._group is not None and self._state.phase is events.Phase.RUNNING:
            self._hangs.begin(self._group, self._attempt, whole=world.nnodes == 1)

    def _arm(self, action: events.Arm) -> None:
        self._disarm()
        self._deadline = self._loop.call_at(
            self._loop.now() + action.after_s, lambda: self._happened(events.Expired(deadline=action.deadline))
        )

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _clear(self, *, gently: bool) -> None:
        if self._group is None:
            self._loop.call_at(self._loop.now(), lambda: self._happened(events.Cleared()))
            return
        how = LeftoverPolicy(self._spec.leftovers) if gently else LeftoverPolicy.KILL
        self._group.clear(self._helpers() | {self._orphan_reaper.pid}, how)

    def _helpers(self) -> frozenset[int]:
        """Pids of the fork server, the sidecar and the checkpoint search, those that run."""
        pids = {self._starter.pid, self._sidecar.pid if self._sidecar else None}
        return frozenset(pid for pid in pids if pid is not None) | self._recovery.pids | self._hangs.pids

    def _group_cleared(self, left: list[int]) -> None:
        if left:
            pids = ", ".join(map(str, left))
            self._console.say(f"cannot end {pids}: still running after SIGKILL (state D?); see dmesg")
            self._context.rundir.event("unkillable", pids=left)
        self._judge()

    def _left_running(self, pids: list[int]) -> None:
        self._context.rundir.event("left_running", pids=pids)
        self._console.say(cleanup.sentence(pids, LeftoverPolicy(self._spec.leftovers)))

    def _judge(self) -> None:
        """Find out who is to blame for the finished attempt, and ask whether there will be another."""
        ended_as = self._state.outcome
        if ended_as not in (events.Outcome.FAILURE, events.Outcome.PEER_FAILURE):
            self._blame = self._decision = None
            self.goodput.stopped(self._signals.first_s)
            self._happened(events.Cleared())
            return
        self._blame = outcome.blame_of(self._ends(), self._told_s)
        seen_s = self._first_end_s or self._loop.now()
        cause_s = failed_at_s(self._blame.first) if self._blame is not None else seen_s
        self.goodput.failed(*(self._hangs.times_s or (min(cause_s, seen_s), seen_s)))
        if self._state.final and not self._state.preempted and self._spec.nnodes == 1:
            self._happened(events.Cleared(again=False))
            return
        self._awaits_verdict = True
        self._rendezvous.judge(self._cause())

    def _judged(self, decision: Decision, why: str) -> None:
        if not self._awaits_verdict:
            return
        self._awaits_verdict = False
        self._decision = decision
        self._elsewhere = why
        if decision.again and not self._state.final:
            kind = self._blame.kind.value if self._blame is not None else self._state.outcome.value
            self.goodput.restarted(kind)
        self._happened(events.Cleared(again=decision.again, pause_s=decision.wait_s))

    def _tell_peers(self, action: events.TellPeers) -> None:
        if action.ok:
            self._rendezvous.succeeded()
        else:
            self._rendezvous.failed(replace(self._cause(), final=action.final, preempted=action.preempted))

    def _cause(self) -> Cause:
        """Why the ranks of this node end, as far as it is known now."""
        blame = outcome.blame_of(self._ends(), self._told_s)
        now_s = self._loop.now()
        by_node = self._state.outcome is not events.Outcome.PEER_FAILURE  # a signal, or no rank could be started
        return Cause(
            text=self._reason_for_peers(blame),
            tier=Tier.OWN if blame is None and by_node else outcome.tier_of(blame),
            kind=blame.kind if blame is not None else None,
            age_s=max(0.0, now_s - failed_at_s(blame.first)) if blame is not None else 0.0,
            signature=signature(blame) if blame is not None else "",
            step=self._recovery.last_step,
            resumed_step=self._recovery.resumed_step,
            uptime_s=self._recovery.uptime_s,
            exit_code=exit_code(blame.first)
            if blame is not None
            else 128 + self._state.signum
            if self._state.signum
            else 1,
            leaves=bool(self._state.signum),
        )

    def _reason_for_peers(self, blame: Blame | None) -> str:
        return outcome.reason_for_peers(
            signum=self._state.signum,
            blame=blame,
            hang=self._group.hang if self._group is not None else "",
            decision=self._decision,
            error=self._error or self._peer_error,
        )

    def _report_failure(self, *, restarting: bool) -> None:
        if self._blame is None and not self._elsewhere:
            return
        why = self._decision.why if self._decision is not None else ""
        self._report(self._blame, self._attempt, restarting, why, self._elsewhere)

    def _forget_attempt(self) -> None:
        """Detach that attempt's failure: what ends the job from here on is not caused by it."""
        self._group = self._blame = self._decision = self._told_s = None
        self._error = self._peer_error = self._elsewhere = ""

    def _ends(self) -> list[RankEnd]:
        return self._group.ends if self._group is not None else []

    def _job_end(self) -> outcome.JobEnd:
        return outcome.JobEnd(
            outcome=self._outcome,
            signum=self._state.signum,
            preempted=self._state.preempted,
            resumable=self._resumable,
            node_lost=self._node_lost,
            decision=self._decision,
            blame=self._blame,
        )


_DECIDED_BY_PLAN = 1 << 30
"""How many restarts one node of several would allow: all share one budget, which the plan keeps."""
_NO_WORLD = World(
    attempt=0, nnodes=1, node_rank=0, first_rank=0, world_size=0, master_addr="", master_port=0, store_fd=None
)
"""For cleanup when no attempt was ever started."""
