"""One attempt's processes: the store and the ranks, from their start until all have ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpulaunch.launcher.agent.cleanup import Cleanup, LeftoverPolicy, is_of_ranks
from gpulaunch.launcher.agent.exit_info import rank_end_of
from gpulaunch.launcher.agent.rank_start import RankStart
from gpulaunch.launcher.agent.run_context import RunContext
from gpulaunch.launcher.failure.ends import RankEnd, signal_name
from gpulaunch.launcher.loop import child, linux
from gpulaunch.launcher.loop.forkserver import ForkedRank, ForkServer, Started
from gpulaunch.launcher.loop.loop import Exit
from gpulaunch.launcher.loop.orphan_reaper import comes_last
from gpulaunch.launcher.rendezvous.base import World


@dataclass(frozen=True, kw_only=True)
class GroupEvents:
    """Callbacks of a group."""

    started: Callable[[frozenset[int]], None]
    """The local ranks that now run."""
    start_failed: Callable[[frozenset[int], str, bool], None]
    """The ranks that run although others could not be started, why, and whether a retry is pointless."""
    rank_ended: Callable[[int, RankEnd, Exit], None]
    """One local rank has ended."""
    cleared: Callable[[list[int]], None]
    """Called once after `clear()`: only these pids, which could not be ended, are left."""
    started_again: Callable[[dict[str, Any]], None]
    """A forked rank restarts as a plain interpreter, or no longer can (see loop.restart_plain): rank, packages,
    why, and written (bytes) and threads, or too_late (why)."""
    store_lost: Callable[[Exit], None]
    """The store ended without having been asked to."""
    left_running: Callable[[list[int]], None]
    """These processes, left behind by the ranks after a successful end, still run: waited for, left, or ended now."""


class RankGroup:
    """One attempt of a job on this node."""

    def __init__(
        self,
        context: RunContext,
        world: World,
        events: GroupEvents,
        *,
        agent_store: bool,
        resume_from: str | None = None,
        resume_args: Sequence[str] = (),
        resume_named: bool = False,
        visible_devices: Sequence[str] = (),
    ) -> None:
        """`agent_store`: the store is started here, alongside the ranks; else rank 0 hosts it.

        `resume_from`: the checkpoint to resume from, "" to start without any, None if none is known;
        `resume_args`: the program's arguments for it; `resume_named`: the user has named it.
        `visible_devices`: the GPUs, if they differ from those that the job would see anyway.
        """
        self._start = RankStart(
            context,
            world,
            resume_from=resume_from,
            resume_args=resume_args,
            resume_named=resume_named,
            visible_devices=visible_devices,
        )
        self._context = context
        self._world = world
        self._events = events
        self._on_cleared = events.cleared
        self.agent_store = agent_store
        self.live: dict[int, int] = {}  # local rank -> pid
        self.ends: list[RankEnd] = []
        self.asked = False
        """The ranks were already requested: a second request is ignored."""
        self._sessions: set[int] = set()  # every rank leads one
        self.store_pid: int | None = None
        self._stopping = False
        self._deaf: set[int] = set()  # pids of ranks without a handler for the signal that asked them to end
        self._told_fd = -1
        self._hung: dict[int, str] = {}  # rank -> why it is considered hung
        self._hung_s: float | None = None
        self._cleanup: Cleanup | None = None
        self._over = False

    @property
    def _run_id(self) -> str:
        return self._context.base_env["GPULAUNCH_RUN_ID"]

    def rank_of(self, local_rank: int) -> int:
        """The global rank of one of this node's ranks."""
        return self._start.rank_of(local_rank)

    @property
    def awaits_store(self) -> bool:
        """The store of this attempt has not been started."""
        return self.store_pid is None and self._cleanup is None and self._store() is not None

    def when_cleared(self, callback: Callable[[list[int]], None]) -> None:
        """Call `callback` when cleared, instead of the previous one."""
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
            self._told_fd, restart_notice_fd = os.pipe()
            os.set_blocking(self._told_fd, False)
            self._context.loop.watch_read(self._told_fd, self._hear_of_rank)
            fds.append(restart_notice_fd)
            ranks: list[ForkedRank] = []
            for local_rank in range(self._context.spec.nproc):
                out, err = self._start.open_logs(local_rank)
                fds += [out, err]
                ranks.append(
                    ForkedRank(
                        env=self._start.environment(local_rank, agent_store=self.agent_store),
                        affinity=self._start.cpus(local_rank),
                        title=self._start.title(local_rank),
                        program=self._start.program(local_rank),
                        stdout_fd=out,
                        stderr_fd=err,
                        restart_notice_fd=restart_notice_fd,
                    )
                )
            server.fork(ranks, store=self._store(), tracer_pid=self._start.tracer_pid)
        except OSError as err:
            self._events.start_failed(frozenset(), f"cannot start the ranks: {err.strerror or err}", True)
        finally:
            for fd in fds:
                os.close(fd)

    def _hear_of_rank(self) -> None:
        """A rank restarts, or the last holder of the pipe has exited."""
        try:
            lines = os.read(self._told_fd, 65536)  # each message is one write and short
        except BlockingIOError:
            return
        if not lines:
            self._hear_no_more()
        for line in lines.splitlines():
            # The program may write to any descriptor that it finds.
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                self._events.started_again(json.loads(line))

    def _hear_no_more(self) -> None:
        if self._told_fd >= 0:
            self._context.loop.unwatch_read(self._told_fd)
            os.close(self._told_fd)
            self._told_fd = -1

    def adopt(self, started: Started) -> None:
        """The fork server has answered: its children are now children of the agent.

        If the attempt was given up and cleared before the answer, they have been ended and reaped, or were forked
        later: those are killed, and the agent's last clearing waits for them.
        """
        if self._over:
            for pid in {*started.pids, started.store_pid or 0} & set(linux.children_of(os.getpid())):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        if started.store_pid is not None:
            self._watch_store(started.store_pid)
            if self._cleanup is not None:  # spawned ranks have ended before the answer
                self._cleanup.store_started(started.store_pid)
        for local_rank, pid in enumerate(started.pids):
            self._watch_rank(local_rank, pid)
        ranks = frozenset(self.live)
        if self._stopping:
            # The attempt was given up while they were being started. Without any, the answer is about the store alone,
            # and spawned ranks have been asked to end: they may take their time.
            if started.pids:
                self.kill()
        elif started.error:
            self._events.start_failed(ranks, f"cannot start all ranks: {started.error}", False)
        elif started.pids:
            self._events.started(ranks)

    def start_spawned(self) -> None:
        """Spawn every rank, once."""
        if self.asked:
            return
        self.asked = True
        spec = self._context.spec
        try:
            self._prepare()
            if not self.agent_store:
                # Rank 0 hosts the store: the port must be free again for it.
                self._release_port()
            for local_rank in range(spec.nproc):
                out, err = self._start.open_logs(local_rank)
                try:
                    pid = child.start(
                        self._start.command(local_rank),
                        {**self._context.base_env, **self._start.environment(local_rank, agent_store=self.agent_store)},
                        stdout_fd=out,
                        stderr_fd=err,
                        affinity=self._start.cpus(local_rank),
                        # A shell cannot trap a signal that was ignored when it started.
                        deaf_to=() if spec.program.kind == "exec" else child.NOTICES,
                        tracer_pid=self._start.tracer_pid,
                    )
                finally:
                    os.close(out)
                    os.close(err)
                self._watch_rank(local_rank, pid)
        except OSError as err:
            # A command that does not exist will not exist for the next attempt.
            self._events.start_failed(frozenset(self.live), str(err.strerror or err), err.errno in (2, 8, 13))
            return
        self._events.started(frozenset(self.live))

    def start_store(self, server: ForkServer) -> None:
        """Start the store for spawned ranks: they wait in the listening socket's queue until it answers."""
        store = self._store()
        if store is not None and self.awaits_store:
            server.fork([], store=store)

    def _prepare(self) -> None:
        self._context.oom.start()
        self._start.make_dirs()

    def _store(self) -> tuple[str, int, int] | None:
        if self._world.store_fd is None or not self.agent_store:
            return None
        return self._world.master_addr, self._world.master_port, self._world.store_fd

    def _release_port(self) -> None:
        if self._world.store_fd is not None:
            with contextlib.suppress(OSError):
                socket.socket(fileno=os.dup(self._world.store_fd)).shutdown(socket.SHUT_RDWR)

    def _watch_rank(self, local_rank: int, pid: int) -> None:
        self.live[local_rank] = pid
        self._sessions.add(pid)
        self._context.oom.watch(pid)
        self._context.loop.watch_pid(pid, lambda exit_: self._rank_ended(local_rank, exit_))

    def _watch_store(self, pid: int) -> None:
        self.store_pid = pid
        self._context.loop.watch_pid(pid, self._store_ended)

    def describe(self) -> dict[str, Any]:
        """The running processes: the content of group.json."""
        world = self._world
        return {
            "version": 1,
            "run_id": self._run_id,
            "name": self._context.spec.name,
            "attempt": world.attempt,
            "world_size": world.world_size,
            "node_rank": world.node_rank,
            "node": self._context.rundir.node,
            "ranks": [
                {"rank": self.rank_of(local_rank), "local_rank": local_rank, "pid": pid}
                for local_rank, pid in self.live.items()
            ],
        }

    # -- ending

    def _rank_ended(self, local_rank: int, exit_: Exit) -> None:
        rank, directory = self.rank_of(local_rank), self._start.dirs[local_rank]
        del self.live[local_rank]
        self._context.hub.finish(rank)
        end = rank_end_of(
            self._context,
            exit_,
            rank=rank,
            local_rank=local_rank,
            directory=directory,
            stopped=self._stopping,
            deaf=exit_.pid in self._deaf,
            hang=self._hung.get(rank, ""),
            hung_s=self._hung_s,
        )
        self.ends.append(end)
        if self._context.segments is not None and exit_.code != 0:
            self._context.segments.keep(rank, directory)
        self._events.rank_ended(local_rank, end, exit_)

    def mark_hung(self, ranks: Iterable[int], why: str) -> None:
        """These ranks are considered hung: that is the cause however they end now."""
        self._hung |= dict.fromkeys(ranks, why)
        self._hung_s = self._context.loop.now()

    def timer_expired(self, pid: int, signum: int, scope: str) -> str:
        """Send a rank's process the signal that it requested; return a message, or "" if it is not a rank's process."""
        if not is_of_ranks(pid, self._sessions, self._run_id):
            return ""
        rank = next((self.rank_of(local_rank) for local_rank, each in self.live.items() if each == pid), None)
        ends_it = signum in (signal.SIGKILL, signal.SIGTERM) and not linux.catches(pid, signum)
        if rank is not None and ends_it:
            self.mark_hung([rank], f"its timer {scope} (torch.distributed.elastic.timer) has expired")
        with contextlib.suppress(OSError):
            os.kill(pid, signum)
        who = "a process of the ranks" if rank is None else f"rank {rank}"
        return f"{who} (pid {pid}): its timer {scope} has expired; it is sent {signal_name(signum)}"

    @property
    def hang(self) -> str:
        """Why ranks are considered hung; "" if none is."""
        return next(iter(self._hung.values()), "")

    def watch_cgroups(self) -> None:
        """Record what must be known of a rank before it dies: its cgroup."""
        for pid in self.live.values():
            self._context.oom.watch(pid)

    def _store_ended(self, exit_: Exit) -> None:
        self.store_pid = None
        if self._cleanup is not None:
            self._cleanup.store_ended()
        else:
            self._events.store_lost(exit_)

    def stop(self, signum: int) -> None:
        """Ask every live rank to end, once: the rank and what it started, but not its dataloader workers.

        torchrun signals the whole process group. But a worker that dies of SIGTERM makes its rank fail in the middle of
        the step that it wanted to finish. Shell wrappers need the group, so all of it is signalled except the workers.
        """
        self._stopping = True
        self._deaf |= {pid for pid in self.live.values() if not linux.catches(pid, signum)}
        for pid in self._members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def request_save(self, signum: int, *, told: bool) -> None:
        """Pass on a notice after which the ranks should save and end by themselves.

        SIGUSR1 and SIGUSR2 go only to processes that catch them. `told`: a rank reads the control segment; if none
        does, and no rank catches the signal either, the ranks are asked to end as torchrun would.
        """
        ranks_hear = any(linux.catches(pid, signum) for pid in self.live.values())
        if signum in child.NOTICES and (told or ranks_hear):
            self._stopping = True
            self.forward_signal(signum)
        else:
            self.stop(signal.SIGTERM if signum in child.NOTICES else signum)

    def forward_signal(self, signum: int) -> None:
        """Pass on a signal that does not mean the end, to the processes with a handler for it."""
        for pid in self._members():
            if linux.catches(pid, signum):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def _members(self) -> list[int]:
        """The ranks and what they started in their process groups, without dataloader workers."""
        leaders = set(self.live.values())
        return [
            pid
            for pid in linux.all_pids()
            if pid in leaders or (linux.group_of(pid) in leaders and linux.comm_of(pid) != linux.LOADER_WORKER)
        ]

    def kill(self) -> None:
        """Kill every live rank and its process group."""
        self._stopping = True
        leaders = set(self.live.values())
        # The ranks first: what they might still start dies with them or is a leftover.
        for pid in (*leaders, *(pid for pid in linux.all_pids() if linux.group_of(pid) in leaders)):
            if pid in leaders or not comes_last(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def clear(self, keep: frozenset[int], how: LeftoverPolicy) -> None:
        """Clear up what the ranks left behind, and end the store; `keep`: the agent's own helpers."""
        self._stopping = True
        if self._cleanup is None:
            self._cleanup = Cleanup(
                self._context.loop,
                run_id=self._run_id,
                sessions=self._sessions,
                foreign=self._context.foreign_children,
                store_pid=self.store_pid,
                told=self._events.left_running,
            )
        self._cleanup.clear(keep, how, done=self._cleared)

    def _cleared(self, left: list[int]) -> None:
        self._hear_no_more()
        self._cleanup = None
        self._over = True
        self._on_cleared(left)
