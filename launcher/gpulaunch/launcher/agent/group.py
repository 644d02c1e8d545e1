"""One attempt's processes: the store and the ranks, from their start until nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpulaunch.launcher.agent.pages import Pages
from gpulaunch.launcher.agent.rundir import RunDir
from gpulaunch.launcher.failure.ends import RankEnd
from gpulaunch.launcher.failure.evidence import LastWords, OomWatch, read_last_words, shm_evidence
from gpulaunch.launcher.job import plan
from gpulaunch.launcher.job.spec import JobSpec, Std
from gpulaunch.launcher.logs.capture import LogHub
from gpulaunch.launcher.loop import child, linux
from gpulaunch.launcher.loop.forkserver import ForkedRank, ForkServer, Started
from gpulaunch.launcher.loop.keeper import KEEPER_COMM
from gpulaunch.launcher.loop.loop import Exit, Loop
from gpulaunch.launcher.rendezvous.base import World

GENTLE_S = 2.0
"""How long what outlives its rank may take to end by itself after a run that went well."""
CLEAR_S = 5.0
"""How long killed leftovers are waited for before the job goes on without them."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What all attempts of a run share."""

    loop: Loop
    spec: JobSpec
    rundir: RunDir
    hub: LogHub
    pages: Pages | None
    base_env: Mapping[str, str]
    use_agent_store: bool
    """Where torch is, to host the store with."""
    foreign_children: frozenset[int]
    """Children this process had before it became a launcher: not ours to end."""
    oom: OomWatch


@dataclass(frozen=True, kw_only=True)
class GroupEvents:
    """What a group calls back."""

    started: Callable[[frozenset[int]], None]
    """The local ranks that run now."""
    start_failed: Callable[[frozenset[int], str, bool], None]
    """Those that run although others could not be started, why, and whether trying again would be in vain."""
    rank_ended: Callable[[int, RankEnd, Exit], None]
    """One local rank has ended."""
    cleared: Callable[[list[int]], None]
    """Once after `clear()`: nothing is left but these pids, which the kernel does not let go."""
    store_lost: Callable[[Exit], None]
    """The store ended, and nobody had asked it to."""


class Group:
    """One attempt of a job on this node."""

    def __init__(self, around: Surroundings, world: World, events: GroupEvents, *, agent_store: bool) -> None:
        """`agent_store`: the store is started here, beside the ranks; else rank 0 is left to host it."""
        self._around = around
        self._world = world
        self._events = events
        self._on_cleared = events.cleared
        self.agent_store = agent_store
        self.live: dict[int, int] = {}  # local rank -> pid
        self.ends: list[RankEnd] = []
        self.asked = False
        """Its ranks were asked for: whoever asks again is late."""
        self._dirs: dict[int, str] = {}
        self._store_pid: int | None = None
        self._stopping = False
        self._clearing = False
        self._deadline_s = 0.0
        self._keep: frozenset[int] = frozenset()
        self._gently = False

    def rank_of(self, local_rank: int) -> int:
        """The global rank of one of this node's ranks."""
        return self._world.first_rank + local_rank

    @property
    def awaits_store(self) -> bool:
        """The store of this attempt has not been started."""
        return self._store_pid is None and not self._clearing and self._store() is not None

    def when_cleared(self, callback: Callable[[list[int]], None]) -> None:
        """Call this instead when cleared."""
        self._on_cleared = callback

    # -- starting

    def start_forked(self, server: ForkServer) -> None:
        """Have the fork server fork store and ranks, once; `server.on_started` must lead to `adopt`."""
        if self.asked:
            return
        self.asked = True
        fds: list[int] = []
        try:
            self._prepare()
            ranks: list[ForkedRank] = []
            for local_rank in range(self._around.spec.nproc):
                out, err = self._open_logs(local_rank)
                fds += [out, err]
                ranks.append(
                    ForkedRank(
                        env=self._environment(local_rank),
                        affinity=self._cpus(local_rank),
                        title=self._title(local_rank),
                        program=self._program(local_rank),
                        stdout_fd=out,
                        stderr_fd=err,
                    )
                )
            server.fork(ranks, store=self._store())
        except OSError as err:
            self._events.start_failed(frozenset(), f"cannot start the ranks: {err.strerror or err}", True)
        finally:
            for fd in fds:
                os.close(fd)

    def adopt(self, started: Started) -> None:
        """The fork server has answered: its children are ours now."""
        if started.store_pid is not None:
            self._watch_store(started.store_pid)
        for local_rank, pid in enumerate(started.pids):
            self._watch_rank(local_rank, pid)
        ranks = frozenset(self.live)
        if self._stopping:
            self.kill()  # they were given up while they were on their way
        elif started.error:
            self._events.start_failed(ranks, f"cannot start all ranks: {started.error}", False)
        elif started.pids:
            self._announce()
            self._events.started(ranks)

    def start_spawned(self) -> None:
        """Start every rank as a program of its own, once."""
        if self.asked:
            return
        self.asked = True
        spec = self._around.spec
        try:
            self._prepare()
            if not self.agent_store:
                # Rank 0 hosts the store: the port must be free again for it.
                self._release_port()
            for local_rank in range(spec.nproc):
                out, err = self._open_logs(local_rank)
                try:
                    pid = child.start(
                        self._command(local_rank),
                        {**self._around.base_env, **self._environment(local_rank)},
                        stdout_fd=out,
                        stderr_fd=err,
                        affinity=self._cpus(local_rank),
                    )
                finally:
                    os.close(out)
                    os.close(err)
                self._watch_rank(local_rank, pid)
        except OSError as err:
            # A command that is not there will not be there for the next attempt.
            self._events.start_failed(frozenset(self.live), str(err.strerror or err), err.errno in (2, 8, 13))
            return
        self._announce()
        self._events.started(frozenset(self.live))

    def start_store(self, server: ForkServer) -> None:
        """For spawned ranks: they wait in the listening socket's queue until the store answers."""
        store = self._store()
        if store is not None and self.awaits_store:
            server.fork([], store=store)

    def _prepare(self) -> None:
        self._around.oom.start()
        for local_rank in range(self._around.spec.nproc):
            rank = self.rank_of(local_rank)
            self._dirs[local_rank] = self._around.rundir.rank_dir(self._world.attempt, rank, local_rank)

    def _store(self) -> tuple[str, int, int] | None:
        if self._world.store_fd is None or not self.agent_store:
            return None
        return self._world.master_addr, self._world.master_port, self._world.store_fd

    def _release_port(self) -> None:
        if self._world.store_fd is not None:
            with contextlib.suppress(OSError):
                socket.socket(fileno=os.dup(self._world.store_fd)).shutdown(socket.SHUT_RDWR)

    def _open_logs(self, local_rank: int) -> tuple[int, int]:
        spec, hub, rank = self._around.spec, self._around.hub, self.rank_of(local_rank)
        fds: list[int] = []
        for stream, name in ((Std.OUT, "stdout.log"), (Std.ERR, "stderr.log")):
            fds.append(
                hub.open(
                    rank=rank,
                    local_rank=local_rank,
                    stream=stream,
                    path=os.path.join(self._dirs[local_rank], name),
                    show=plan.shown(spec, local_rank, stream),
                    prefix=plan.line_prefix(spec, local_rank, rank, stream),
                )
            )
        return fds[0], fds[1]

    def _environment(self, local_rank: int) -> dict[str, str]:
        around, world = self._around, self._world
        env = plan.rank_environment(
            around.spec,
            local_rank=local_rank,
            attempt=world.attempt,
            master_port=world.master_port,
            error_file=os.path.join(self._dirs[local_rank], "error.json"),
            use_agent_store=self.agent_store,
        )
        rank = str(self.rank_of(local_rank))
        # The nodes may run different numbers of ranks: what they agreed on wins over this node's arithmetic.
        env.update(RANK=rank, ROLE_RANK=rank, WORLD_SIZE=str(world.world_size), ROLE_WORLD_SIZE=str(world.world_size))
        env["GPULAUNCH_RUN_DIR"] = around.rundir.path
        if around.pages is not None:
            env["GPULAUNCH_CHANNEL_DIR"] = around.pages.directory
        return env

    def _program(self, local_rank: int) -> dict[str, object]:
        program = self._around.spec.program
        return {
            "kind": program.kind,
            "target": program.target,
            "args": plan.rank_args(self._around.spec, local_rank),
            "python": program.python,
            "call_dir": program.call_dir,
            "error_file": os.path.join(self._dirs[local_rank], "error.json"),
        }

    def _title(self, local_rank: int) -> list[str]:
        """The command line that `python` would have had."""
        return plan.rank_argv(self._around.spec, local_rank)

    def _command(self, local_rank: int) -> list[str]:
        program = self._around.spec.program
        if program.kind == "exec":
            return plan.rank_argv(self._around.spec, local_rank)
        from gpulaunch.launcher.loop import rank_main

        return [program.python, "-u", rank_main.__file__, json.dumps(self._program(local_rank))]

    def _cpus(self, local_rank: int) -> list[int]:
        sets = self._around.spec.cpu_sets
        return sorted(sets[local_rank]) if sets else []

    def _watch_rank(self, local_rank: int, pid: int) -> None:
        self.live[local_rank] = pid
        self._around.loop.watch_pid(pid, lambda exit_: self._rank_ended(local_rank, exit_))

    def _watch_store(self, pid: int) -> None:
        self._store_pid = pid
        self._around.loop.watch_pid(pid, self._store_ended)

    def _announce(self) -> None:
        pages, world = self._around.pages, self._world
        if pages is not None:
            pages.announce(
                run_id=self._around.base_env["GPULAUNCH_RUN_ID"],
                name=self._around.spec.name,
                attempt=world.attempt,
                world_size=world.world_size,
                node_rank=world.node_rank,
                ranks=[
                    {"rank": self.rank_of(local_rank), "local_rank": local_rank, "pid": pid}
                    for local_rank, pid in self.live.items()
                ],
            )

    # -- ending

    def _rank_ended(self, local_rank: int, exit_: Exit) -> None:
        rank, directory = self.rank_of(local_rank), self._dirs[local_rank]
        del self.live[local_rank]
        self._around.hub.finish(rank)
        words = LastWords(error=None, fault=None, evidence=()) if exit_.code == 0 else read_last_words(directory)
        end = RankEnd(
            rank=rank,
            local_rank=local_rank,
            pid=exit_.pid,
            host=os.uname().nodename,
            code=exit_.code,
            signal=exit_.signal,
            at_s=exit_.at_s,
            wall_time_s=time.time(),
            stopped=self._stopping,
            error=words.error,
            tail=tuple(self._around.hub.tail(rank, Std.ERR) or self._around.hub.tail(rank, Std.OUT)),
            fault=words.fault,
            evidence=(*words.evidence, *self._evidence_from_outside(exit_)),
        )
        self.ends.append(end)
        if self._around.pages is not None and exit_.code != 0:
            self._around.pages.keep(rank, directory)
        self._events.rank_ended(local_rank, end, exit_)

    def _evidence_from_outside(self, exit_: Exit) -> tuple[str, ...]:
        if self._stopping or exit_.code == 0:
            return ()
        # A dataloader worker may be what the kernel killed: then its rank ends by an exception.
        facts = [self._around.oom.evidence(), shm_evidence() if exit_.signal == signal.SIGBUS else None]
        return tuple(fact for fact in facts if fact)

    def _store_ended(self, exit_: Exit) -> None:
        self._store_pid = None
        if self._clearing:
            self._check_cleared()
        else:
            self._events.store_lost(exit_)

    def stop(self, signum: int) -> None:
        """Ask every live rank to end, once: the rank and what it started, but not its dataloader workers.

        torchrun signals the whole process group; a worker that dies of SIGTERM makes its rank fail in the middle of
        the step that it wanted to finish, and shell wrappers need the group, so: all of it but the workers.
        """
        self._stopping = True
        leaders = set(self.live.values())
        for pid in linux.all_pids():
            if pid in leaders or (linux.group_of(pid) in leaders and linux.comm_of(pid) != "pt_data_worker"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def kill(self) -> None:
        """End every live rank and its process group at once."""
        self._stopping = True
        for pid in self.live.values():
            # A rank is its group's leader and not yet reaped, so the number cannot be another group's. One that was
            # forked a moment ago may not lead it yet.
            for end in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    end(pid, signal.SIGKILL)

    def clear(self, keep: frozenset[int], *, gently: bool) -> None:
        """End what the ranks left behind, and the store; `keep`: the agent's own helpers.

        The agent is the subreaper of all of them: whatever outlived its rank, however it detached itself, is by now
        a child of this process or a descendant of one.
        """
        loop = self._around.loop
        self._keep = keep | self._around.foreign_children
        self._gently = gently
        again = self._clearing
        self._clearing = self._stopping = True
        if self._store_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._store_pid, signal.SIGKILL)
        self._deadline_s = loop.now() + (GENTLE_S if gently else 0.0) + CLEAR_S
        if not again:
            loop.on_orphan(lambda _: self._check_cleared())
        self._signal_leftovers(signal.SIGTERM if gently else signal.SIGKILL)
        if gently:
            loop.call_at(loop.now() + GENTLE_S, lambda: self._signal_leftovers(signal.SIGKILL))
        loop.call_at(self._deadline_s - CLEAR_S / 2 + 0.01, self._check_cleared)
        loop.call_at(self._deadline_s, self._check_cleared)
        loop.call_at(loop.now(), self._check_cleared)

    def _leftovers(self) -> list[int]:
        mine = [pid for pid in linux.children_of(os.getpid()) if pid not in self._keep and pid != self._store_pid]
        return [pid for pid in mine if linux.state_of(pid) not in ("Z", "X", "")]

    def _signal_leftovers(self, signum: int) -> None:
        """Signal what is left, but the keeper of a launcher that ran inside a rank: it cleans up and ends by itself."""
        late = self._around.loop.now() > self._deadline_s - CLEAR_S / 2
        for pid in self._leftovers():
            for one in (pid, *linux.descendants_of(pid)):
                if late or linux.comm_of(one) != KEEPER_COMM:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(one, signum)

    def _check_cleared(self) -> None:
        if not self._clearing:
            return
        left = self._leftovers()
        now_s = self._around.loop.now()
        if (left or self._store_pid is not None) and now_s < self._deadline_s:
            if left and (not self._gently or now_s > self._deadline_s - CLEAR_S):
                # The orphans of the orphans just killed have become ours meanwhile.
                self._signal_leftovers(signal.SIGKILL)
            return
        self._clearing = False
        self._around.loop.on_orphan(lambda _: None)
        self._around.loop.forget_unclaimed()
        self._on_cleared(left)
