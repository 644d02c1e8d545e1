"""The keeper: a small process that outlives the agent, to end what a killed agent leaves behind.

Ranks die with the agent by PR_SET_PDEATHSIG, but their own children (dataloader workers, helpers that started a
session of their own) do not. While the agent lives, it is their subreaper and ends them itself. When it is killed,
the pipe it held to the keeper closes, and the keeper ends every process that was started with this run's mark in its
environment, and removes the run's shared memory. The keeper does nothing else; the agent dismisses it with one byte.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
from typing import NoReturn

from gpulaunch.launcher.loop import linux

KEEPER_COMM = "gpulaunch-keep"
_DISMISS_S = 1.0
_INNER_S = 2.0
"""How long the keeper of a launcher that ran inside this job may take for its own sweep."""
_MAX_ROUNDS = 50  # a fork bomb is not ours to win against


class Keeper:
    """The agent's end of it."""

    def __init__(self, mark: str, directories: list[str]) -> None:
        """`mark`: the run id that every process of the run carries in its environment; `directories`: removed."""
        self._mark = mark
        self._directories = directories
        self._write = -1
        self.pid = -1
        self.start()

    def start(self) -> None:
        """Start the process; again, when somebody has killed it."""
        if self._write >= 0:
            os.close(self._write)
        read, self._write = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            _keep(read, self._mark, self._directories)
        os.close(read)

    def dismiss(self) -> None:
        """The agent has cleaned up itself: the keeper may go."""
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


def _keep(read: int, mark: str, directories: list[str]) -> NoReturn:
    try:
        os.setsid()
        linux.set_comm(KEEPER_COMM)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_IGN)
        # Whoever waits for the end of the launcher's output must not wait for the keeper.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        os.dup2(read, 3)
        os.closerange(4, 65536 if (limit := os.sysconf("SC_OPEN_MAX")) < 0 else min(limit, 65536))
        if os.read(3, 1) == b"":
            sweep(mark)
            for directory in directories:
                shutil.rmtree(directory, ignore_errors=True)
    finally:
        os._exit(0)


def sweep(mark: str) -> None:
    """Kill every process whose environment names the run `mark`, again until none is found.

    The keeper of a launcher that ran inside a rank is one of them. It has work to do, the same for its own run, and
    comes last, when it has had time for it.
    """
    for _ in range(_MAX_ROUNDS):
        found = [pid for pid in linux.all_pids() if pid != os.getpid() and linux.is_of_run(pid, mark)]
        found = [pid for pid in found if linux.state_of(pid) not in ("Z", "X", "")]
        others = [pid for pid in found if linux.comm_of(pid) != KEEPER_COMM]
        if not found:
            break
        for pid in others:
            _kill_and_wait(pid, mark, patience_s=0.0)
        for pid in [] if others else found:
            _kill_and_wait(pid, mark, patience_s=_INNER_S)


def _kill_and_wait(pid: int, mark: str, *, patience_s: float) -> None:
    """Give a process `patience_s` to end, kill it, and see it end."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        # The pid may have been given to another process between the look and the open.
        if linux.is_of_run(pid, mark) and not (patience_s and poller.poll(patience_s * 1000)):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poller.poll(1_000)
    except OSError:
        pass  # it ended by itself
    finally:
        os.close(pidfd)
