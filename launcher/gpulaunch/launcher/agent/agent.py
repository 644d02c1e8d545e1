"""The agent: turns what the loop reports into events, asks `state.step`, and does what it says. It decides nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from gpulaunch.launcher.agent import packages, state, summary, words
from gpulaunch.launcher.agent.group import CLEAR_S, Group, GroupEvents, Surroundings
from gpulaunch.launcher.agent.sidecar import SidecarProcess
from gpulaunch.launcher.failure.blame import Blame, blame, exit_code
from gpulaunch.launcher.failure.classify import Kind, classify
from gpulaunch.launcher.failure.ends import RankEnd, how, signal_name
from gpulaunch.launcher.job.imports import Reading
from gpulaunch.launcher.logs.console import Console
from gpulaunch.launcher.loop import linux
from gpulaunch.launcher.loop.forkserver import ForkServer, Ready, Started
from gpulaunch.launcher.loop.keeper import Keeper
from gpulaunch.launcher.loop.loop import Exit, Timer
from gpulaunch.launcher.rendezvous.base import Rendezvous, World

_HELPERS_S = 1.0
"""How long sidecar and fork server may take to end by themselves at the end of the job."""
_MAX_LOST_SERVERS = 3
"""After so many fork servers that died before they were ready, ranks are spawned."""
_PROGRESS_S = (10.0, 30.0, 60.0)
"""When progress is shown; then every `_PROGRESS_EVERY_S`."""
_PROGRESS_EVERY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the job ended: the exit code, and what was to blame, if anything was."""

    code: int
    blame: Blame | None
    error: str
    """Why it could not be started or went on no longer, where no rank is to blame."""
    stopped_by: str
    """The name of the signal that ended it, or ""."""


class Agent:
    """One job on one node, from the first attempt to the exit code."""

    def __init__(
        self,
        around: Surroundings,
        *,
        console: Console,
        rendezvous: Rendezvous,
        sidecar: SidecarProcess | None,
        keeper: Keeper,
        report: Callable[[Blame, int, bool], None],
        reading: Reading,
        spawn_because: str,
    ) -> None:
        """`report(blame, attempt, restarting)` writes and shows a failure; `spawn_because`: why not to fork, or ""."""
        self._around = around
        self._loop = around.loop
        self._spec = around.spec
        self._console = console
        self._rendezvous = rendezvous
        self._sidecar = sidecar
        self._keeper = keeper
        self._report = report
        self._reading = reading
        self._spawn_because = spawn_because
        self._agent_store = around.use_agent_store
        self._state, self._first = state.first(restarts=around.spec.max_restarts, grace_s=around.spec.grace_s)
        self._group: Group | None = None
        self._server: ForkServer | None = None
        self._lost_servers = 0
        self._world: World | None = None
        self._deadline: Timer | None = None
        self._started_s = self._loop.now()
        self._blame: Blame | None = None
        self._error = ""
        self._peer_error = ""
        self._outcome = words.Outcome.OPEN
        self.totals: dict[int, summary.RankTotals] = {}
        rendezvous.on_joined = self._joined
        rendezvous.on_failed = self._join_failed
        rendezvous.on_peer_failed = self._peer_failed
        rendezvous.on_peers_done = lambda: self._happened(words.PeersDone())
        for name in around.spec.signals:
            self._loop.on_signal(signal.Signals[name], self._signalled)

    @property
    def num_restarts(self) -> int:
        """How often the ranks were started again."""
        return self._state.attempt

    def start_server(self) -> None:
        """Start the fork server: first of all, because `import torch` is what everything waits for."""
        self._server = ForkServer(
            loop=self._loop, on_ready=self._server_ready, on_started=self._server_started, on_lost=self._server_lost
        )
        forking = not self._spawn_because
        names = list(self._reading.packages) if forking else []
        try:
            self._server.start(
                self._around.base_env,
                dynamo=forking,
                packages=names,
                refused=packages.recall(names),
                environment=self._reading.environment if forking else {},
            )
        except OSError as err:
            self._server = None
            self._spawn_because = self._spawn_because or f"the fork server cannot be started: {err.strerror}"

    def run(self) -> Ended:
        """Turn the loop until the job has ended."""
        self._loop.watch_pid(self._keeper.pid, self._keeper_lost)
        self._do(self._first)
        self._show_progress_at(0)
        self._loop.run()
        return Ended(
            code=self._exit_code(),
            blame=self._blame,
            error=self._error or self._peer_error,
            stopped_by=signal_name(self._state.signum) if self._outcome is words.Outcome.SIGNAL else "",
        )

    def close(self) -> None:
        """End everything this agent started, whatever state it was in; bounded in time."""
        if self._server is not None:
            self._server.close()
        if self._group is not None:
            self._group.kill()
        self._rendezvous.close()
        if self._sidecar is not None:
            self._sidecar.close()
        # The helpers were asked to go; whoever is still here after a moment is killed, as any leftover. A fork server
        # that still imports does not listen: it is not waited for.
        if self._server is not None and self._server.ready is None:
            self._server = None
        self._turn_until(lambda: not self._helpers() & frozenset(linux.children_of(os.getpid())), _HELPERS_S)
        cleared: list[list[int]] = []
        group = self._group or Group(self._around, _NO_WORLD, self._group_events(), agent_store=False)
        group.when_cleared(cleared.append)
        group.clear(frozenset({self._keeper.pid}), gently=False)
        self._turn_until(lambda: bool(cleared), 2 * CLEAR_S)

    def _turn_until(self, done: Callable[[], bool], within_s: float) -> None:
        until_s = self._loop.now() + within_s
        while not done() and self._loop.now() < until_s:
            self._loop.turn(until_s - self._loop.now())

    def _keeper_lost(self, exit_: Exit) -> None:
        self._around.rundir.event("keeper_lost", pid=exit_.pid)
        self._keeper.start()
        self._loop.watch_pid(self._keeper.pid, self._keeper_lost)

    # -- events

    def _happened(self, event: words.Event) -> None:
        before = self._state.phase
        self._state, actions = state.step(self._state, event)
        if self._state.phase is not before:
            self._around.rundir.event("phase", phase=self._state.phase.value, attempt=self._state.attempt)
        self._do(actions)

    def _signalled(self, signum: int) -> None:
        name = signal_name(signum)
        if self._state.signum:
            self._console.say(f"{name} again: ending at once")
        else:
            self._console.say(
                f"{name}: the ranks may end by themselves within {self._spec.grace_s:g} s; once more: at once"
            )
        self._happened(words.Signalled(signum=signum))

    def _joined(self, world: World) -> None:
        self._world = world
        self._happened(words.Joined())

    def _join_failed(self, why: str) -> None:
        self._error = why
        self._happened(words.StartFailed())

    def _peer_failed(self, final: bool, why: str) -> None:
        self._peer_error = why
        self._console.say(why)
        self._happened(words.PeerFailed(final=final))

    def _server_ready(self, ready: Ready) -> None:
        packages.remember(ready.refused)
        self._around.rundir.event("fork_server_ready", pid=ready.pid, loaded=ready.loaded, refused=dict(ready.refused))
        if ready.refused:
            left = "; ".join(f"{name} ({why})" for name, why in ready.refused.items())
            self._console.say(f"not preloaded, each rank imports it for itself: {left}")
        if ready.problem and not self._spawn_because and self._spec.start_method != "fork":
            self._spawn_because = ready.problem
            self._console.say(f"starting every rank as a program of its own, not as a fork: {ready.problem}")
        if self._group is not None and self._state.phase is not words.Phase.CLEARING:
            self._start_with(self._group)

    def _server_started(self, started: Started) -> None:
        if self._group is not None:
            self._group.adopt(started)

    def _server_lost(self) -> None:
        """The fork server is gone. Ranks that run and have their store need it no more; others get a new one."""
        self._server = None
        self._around.rundir.event("fork_server_lost", phase=self._state.phase.value)
        group, phase = self._group, self._state.phase
        starting = phase is words.Phase.STARTING
        if group is None or not (starting or (phase is words.Phase.RUNNING and group.awaits_store)):
            return
        self._lost_servers += 1
        if starting and group.asked:
            self._start_failed(frozenset(group.live), "the fork server died while it started the ranks", False)
        elif self._lost_servers < _MAX_LOST_SERVERS:
            self.start_server()
        else:
            self._do_without_server(group, f"the fork server died {self._lost_servers} times")

    def _do_without_server(self, group: Group, why: str) -> None:
        """From now on ranks are spawned, and rank 0 hosts the store."""
        self._agent_store = False
        self._spawn_because = self._spawn_because or why
        self._console.say(f"starting every rank as a program of its own, not as a fork: {why}")
        if group.asked:
            self._error = f"the ranks wait for a store that cannot be started: {why}"
            self._happened(words.StoreLost())
        else:
            group.agent_store = False
            group.start_spawned()

    def _start_failed(self, ranks: frozenset[int], why: str, final: bool) -> None:
        self._error = why
        self._happened(words.StartFailed(ranks=ranks, final=final))

    def _rank_ended(self, local_rank: int, end: RankEnd, exit_: Exit) -> None:
        pages = self._around.pages
        page = pages.read(end.rank) if pages is not None else None
        self.totals.setdefault(end.rank, summary.RankTotals()).add(page, exit_.max_rss_bytes)
        self._around.rundir.event(
            "rank_ended",
            seen_s=end.at_s,
            rank=end.rank,
            pid=end.pid,
            code=end.code,
            signal=end.signal,
            attempt=self._state.attempt,
            stopped=end.stopped,
        )
        ok = end.code == 0
        echo = not ok and classify(end) is Kind.PEER
        self._happened(words.RankEnded(local_rank=local_rank, ok=ok, echo=echo))

    def _store_lost(self, exit_: Exit) -> None:
        how_ended = f"was killed by {signal_name(exit_.signal)}" if exit_.signal else f"ended with code {exit_.code}"
        self._around.rundir.event("store_lost", pid=exit_.pid, how=how_ended, attempt=self._state.attempt)
        self._error = f"the ranks' store (pid {exit_.pid}) {how_ended}; ranks that ask it would wait for ever"
        self._console.say(self._error)
        self._happened(words.StoreLost())

    # -- actions

    def _do(self, actions: tuple[words.Action, ...]) -> None:
        for action in actions:
            match action:
                case words.Join():
                    self._rendezvous.join(action.attempt)
                case words.Start():
                    self._start()
                case words.Stop():
                    if self._group is not None:
                        self._group.stop(action.signum)
                case words.Kill():
                    if self._group is not None:
                        self._group.kill()
                case words.Arm():
                    self._arm(action)
                case words.Disarm():
                    self._disarm()
                case words.Clear():
                    self._clear(gently=action.gently)
                case words.TellPeers():
                    self._tell_peers(action)
                case words.Report():
                    self._report_failure(restarting=action.restarting)
                case words.Finish():
                    self._outcome = action.outcome
                    self._loop.stop()

    def _start(self) -> None:
        assert self._world is not None, "started before it was joined"
        spec, around, world = self._spec, self._around, self._world
        self._error = self._peer_error = ""
        self._blame = None
        if around.pages is not None:
            try:
                around.pages.prepare(
                    [(world.first_rank + local_rank, local_rank) for local_rank in range(spec.nproc)], world.attempt
                )
            except OSError as err:
                self._console.say(f"no profile of this attempt: no room for shared pages: {err.strerror}")
        self._group = Group(around, world, self._group_events(), agent_store=self._agent_store)
        if self._server is None and (self._agent_store or not self._spawn_because):
            self.start_server()
        self._start_with(self._group)

    def _group_events(self) -> GroupEvents:
        return GroupEvents(
            started=self._ranks_started,
            start_failed=self._start_failed,
            rank_ended=self._rank_ended,
            cleared=self._group_cleared,
            store_lost=self._store_lost,
        )

    def _start_with(self, group: Group) -> None:
        """Start what can be started now; called again when the fork server is ready."""
        server = self._server if self._server is not None and self._server.ready is not None else None
        if self._spawn_because:
            if server is not None:
                group.start_store(server)
            group.start_spawned()
        elif server is not None:
            group.start_forked(server)

    def _ranks_started(self, ranks: frozenset[int]) -> None:
        self._around.rundir.event(
            "started", attempt=self._state.attempt, pids=dict(self._group.live) if self._group else {}
        )
        self._happened(words.Started(ranks=ranks))

    def _arm(self, action: words.Arm) -> None:
        self._disarm()
        self._deadline = self._loop.call_at(
            self._loop.now() + action.after_s, lambda: self._happened(words.Expired(deadline=action.deadline))
        )

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _clear(self, *, gently: bool) -> None:
        if self._group is None:
            self._loop.call_at(self._loop.now(), lambda: self._happened(words.Cleared()))
            return
        self._group.clear(self._helpers() | {self._keeper.pid}, gently=gently)

    def _helpers(self) -> frozenset[int]:
        """The fork server and the sidecar, as far as they run."""
        pids = {self._server.pid if self._server else None, self._sidecar.pid if self._sidecar else None}
        return frozenset(pid for pid in pids if pid is not None)

    def _group_cleared(self, left: list[int]) -> None:
        if left:
            pids = ", ".join(map(str, left))
            self._console.say(f"cannot end {pids}: killed, but the kernel does not let go (state D?); see dmesg")
            self._around.rundir.event("unkillable", pids=left)
        self._happened(words.Cleared())

    def _tell_peers(self, action: words.TellPeers) -> None:
        why = ""
        if not action.ok and self._group is not None and self._group.ends:
            first = blame(self._group.ends).first
            why = f"rank {first.rank} on {first.host} {how(first)}"
        self._rendezvous.tell(ok=action.ok, final=action.final, why=why or self._error)

    def _report_failure(self, *, restarting: bool) -> None:
        if self._group is None or not any(end.code != 0 for end in self._group.ends):
            return
        if all(end.stopped for end in self._group.ends if end.code != 0):
            return  # they ended because they were told to, by a person or for another node: nothing failed here
        self._blame = blame(self._group.ends)
        attempt = self._state.attempt - (1 if restarting else 0)
        self._report(self._blame, attempt, restarting)

    def _exit_code(self) -> int:
        if self._outcome is words.Outcome.SUCCESS:
            return 0
        if self._outcome is words.Outcome.SIGNAL:
            return 128 + self._state.signum
        if self._blame is not None:
            return exit_code(self._blame.first)
        return 1

    # -- progress

    def _show_progress_at(self, index: int) -> None:
        after_s = (
            _PROGRESS_S[index]
            if index < len(_PROGRESS_S)
            else _PROGRESS_S[-1] + _PROGRESS_EVERY_S * (index - len(_PROGRESS_S) + 1)
        )
        self._loop.call_at(self._started_s + after_s, lambda: self._show_progress(index))

    def _show_progress(self, index: int) -> None:
        pages, group = self._around.pages, self._group
        if pages is not None and group is not None:
            read = {rank: pages.read(rank) for rank in map(group.rank_of, group.live)}
            line = summary.progress(
                {rank: page for rank, page in read.items() if page is not None}, self._loop.now() - self._started_s
            )
            if line:
                self._console.say(line)
        self._show_progress_at(index + 1)


_NO_WORLD = World(
    attempt=0, nnodes=1, node_rank=0, first_rank=0, world_size=0, master_addr="", master_port=0, store_fd=None
)
"""For clearing up when no attempt was ever started."""
