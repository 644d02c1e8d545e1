"""The orphan reaper: a small process that outlives the agent and ends what a killed agent leaves behind.

Ranks die with the agent by PR_SET_PDEATHSIG, but their own children (dataloader workers, helpers with their own
session) do not. While the agent lives, it is their subreaper and ends them itself. When it is killed, its pipe to the
orphan reaper closes; the reaper ends what the ranks left, and removes the run's shared memory. It does nothing else;
the agent dismisses it with one byte.

A leftover of the ranks carries the run's mark in its environment and descends from the agent. The mark alone is no
proof: sbatch, at and systemd-run pass a rank's environment to other processes. Descent remains visible: the
processes that the agent's death orphaned have the same new parent as the reaper, and the rest is below them. Where
systemd adopts orphans, what it starts itself is in another cgroup. In doubt a process is left alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from typing import NoReturn

from gpulaunch.launcher.loop import linux

REAPER_COMM = "gpulaunch-keep"
_DISMISS_S = 1.0
_INNER_S = 2.0
"""How long processes that clean up after others may take for that."""
_MAX_ROUNDS = 50  # a fork bomb cannot be stopped
_REPARENTED_S = 10.0
_LOOK_AGAIN_S = 0.01


class OrphanReaper:
    """The agent's side of it. It starts the process as a child of the agent."""

    def __init__(self, mark: str, directories: list[str]) -> None:
        """`mark`: the run id that every process of the run carries in its environment; `directories`: removed."""
        self._mark = mark
        self._directories = directories
        self._write = -1
        self.pid = -1
        self.start()

    def start(self) -> None:
        """Start the process; also again, if it was killed."""
        if self._write >= 0:
            os.close(self._write)
        read, self._write = os.pipe2(os.O_CLOEXEC)
        agent_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _reap(read, self._mark, self._directories, agent_pid)
        os.close(read)

    def dismiss(self) -> None:
        """The agent has cleaned up itself: let the orphan reaper exit."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"d")
        os.close(self._write)
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(self.pid)
            try:
                if not select.select([pidfd], [], [], _DISMISS_S)[0]:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            finally:
                os.close(pidfd)


def _reap(read: int, mark: str, directories: list[str], agent_pid: int) -> NoReturn:
    try:
        os.setsid()
        linux.set_comm(REAPER_COMM)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_IGN)
        # Readers that wait for the end of the launcher's output must not wait for the orphan reaper.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        os.dup2(read, 3)
        os.closerange(4, 65536 if (limit := os.sysconf("SC_OPEN_MAX")) < 0 else min(limit, 65536))
        if os.read(3, 1) == b"":
            _await_adoption(agent_pid)
            sweep(mark)
            for directory in directories:
                shutil.rmtree(directory, ignore_errors=True)
    finally:
        os._exit(0)


def _await_adoption(agent_pid: int) -> None:
    """Wait: the kernel closes the descriptors of a dying process before it re-parents its children."""
    until_s = time.monotonic() + _REPARENTED_S
    while os.getppid() == agent_pid and time.monotonic() < until_s:
        time.sleep(0.001)


def comes_last(pid: int) -> bool:
    """Whether a process cleans up after the others have ended, and then exits by itself.

    The orphan reaper of a launcher that ran inside a rank does the same as this one, for its own run.
    """
    return linux.comm_of(pid) == REAPER_COMM or linux.is_resource_tracker(pid)


def sweep(mark: str) -> None:
    """Kill what carries the run's mark and descends from the ranks, repeatedly until none is found.

    The caller was orphaned by the same death as those processes.
    """
    for _ in range(_MAX_ROUNDS):
        found, unclear = leftovers(mark)
        if not found and not unclear:
            break
        others = [pid for pid in found if not comes_last(pid)]
        for pid in others:
            _kill_and_wait(pid, mark, patience_s=0.0)
        for pid in [] if others else found:
            _kill_and_wait(pid, mark, patience_s=_INNER_S)
        if unclear and not found:
            time.sleep(_LOOK_AGAIN_S)


def leftovers(mark: str) -> tuple[list[int], list[int]]:
    """The processes that carry the mark and descend from this one's former parent; and those for which this is not yet
    known, because their parent is just exiting."""
    cgroup, adopter = linux.cgroup_of("self"), os.getppid()
    marked = {pid for pid in linux.all_pids() if pid != os.getpid() and linux.is_of_run(pid, mark)}
    marked = {pid for pid in marked if linux.state_of(pid) not in ("Z", "X", "") and linux.cgroup_of(pid) == cgroup}
    found: list[int] = []
    unclear: list[int] = []
    for pid in marked:
        parent = linux.parent_of(pid)
        for _ in range(len(marked)):
            if parent is None or parent not in marked:
                break
            parent = linux.parent_of(parent)
        if parent == adopter:
            found.append(pid)
        elif parent is None or linux.is_ending(parent):
            unclear.append(pid)
    return found, unclear


def _kill_and_wait(pid: int, mark: str, *, patience_s: float) -> None:
    """Give a process `patience_s` to end, kill it, and wait for its end."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        # The pid may have been reused between the check and the open.
        if linux.is_of_run(pid, mark) and not (patience_s and poller.poll(patience_s * 1000)):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poller.poll(1_000)
    except OSError:
        pass  # it exited by itself
    finally:
        os.close(pidfd)
