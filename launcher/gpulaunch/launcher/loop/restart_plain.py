"""Restarts a forked rank as a plain interpreter: same process, session, stdio and CPUs; the script from its top.

Done before the import of a package that would differ from what the fork server has imported. It is a plain exec: no
atexit function runs, nothing is flushed or closed as at a program's end, because the program has not ended and repeats
all of it. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

LATEST_S = 120.0
"""If a program has run longer, too much work would be repeated for a variable set before an import."""

_FDS_FROM = 100  # so that the program's own files get the numbers they would have


class RestartPlain:
    """How this rank was started, and how it restarts."""

    def __init__(self, program: Mapping[str, Any], restart_notice_fd: int) -> None:
        """`restart_notice_fd`: where to report to the agent; -1: nowhere."""
        self._program = dict(program)
        self._tell = _Descriptor(restart_notice_fd)
        self._started_s = time.monotonic()
        self._env = dict(os.environ)
        self._cwd = os.getcwd()
        self._cpus = os.sched_getaffinity(0)
        self._ignored = _ignored_signals()
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._written = _bytes_written()
        self._stdio: dict[int, _Descriptor] = {}
        for fd in (0, 1, 2):
            with contextlib.suppress(OSError):
                self._stdio[fd] = _Descriptor(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FDS_FROM))
        os.register_at_fork(after_in_child=self._close_stdio)

    def __call__(self, packages: list[str], why: str) -> None:
        """Restart, and report why; `packages`: those that must not be imported before the fork for this program.

        Returns if that is impossible, after reporting it: the interpreter cannot be executed, or it is too late.
        """
        told: dict[str, Any] = {"rank": int(self._env.get("RANK", "-1")), "packages": packages, "why": why}
        too_late = self._too_late()
        if too_late:
            self._tell.write({**told, "too_late": too_late})
            return
        told |= {"written": _bytes_written() - self._written, "threads": threading.active_count() - 1}
        self._tell.write(told)
        processes = sys.modules.get("multiprocessing.process")
        for child in processes.active_children() if processes is not None else ():
            with contextlib.suppress(Exception):
                child.kill()  # the restarted program starts it again
        self._reset()
        from gpulaunch.launcher.loop import rank_main

        argv = [self._program["python"] or sys.executable, "-u", rank_main.__file__, json.dumps(self._program)]
        with contextlib.suppress(OSError):
            os.execve(argv[0], argv, self._env)  # noqa: S606 (the rank's own program)

    def _reset(self) -> None:
        """Reset what the next program would otherwise inherit."""
        with contextlib.suppress(OSError):
            os.chdir(self._cwd)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._cpus)
        for fd, kept in self._stdio.items():
            if kept.is_open():
                os.dup2(kept.fd, fd)
        signal.setitimer(signal.ITIMER_REAL, 0)
        from gpulaunch.launcher.loop import linux

        for number in _ignored_signals() - self._ignored:
            linux.default_action(number)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)

    def _too_late(self) -> str:
        """Why this rank can no longer restart from its top, or ""."""
        distributed, cuda = sys.modules.get("torch.distributed"), sys.modules.get("torch.cuda")
        try:
            if distributed is not None and distributed.is_available() and distributed.is_initialized():
                return "the process group exists"
            if cuda is not None and cuda.is_initialized():
                return "a GPU is in use"
        except Exception:
            return "torch is in use"
        return f"it has run for over {LATEST_S:.0f} s" if time.monotonic() - self._started_s > LATEST_S else ""

    def _close_stdio(self) -> None:
        """In a child: it cannot restart, and must not keep the rank's output open."""
        for kept in self._stdio.values():
            if kept.is_open():
                os.close(kept.fd)
        self._stdio.clear()


class _Descriptor:
    """A descriptor that the program may close and whose number it may then reuse for another file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._seen = self._look()

    def _look(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError, OverflowError):
            seen = os.fstat(self.fd)
            return seen.st_dev, seen.st_ino
        return None

    def is_open(self) -> bool:
        return self._seen is not None and self._look() == self._seen

    def write(self, message: Mapping[str, Any]) -> None:
        """Write a line of JSON, if it is still the same file."""
        with contextlib.suppress(OSError):
            if self.is_open():
                os.write(self.fd, json.dumps(message).encode() + b"\n")


def _ignored_signals() -> set[int]:
    return {number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN}


def _bytes_written() -> int:
    """Bytes that this process has passed to write(2) so far, as the kernel counts them."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/io", encoding="ascii") as counts:
        for line in counts:
            if line.startswith("wchar:"):
                return int(line.split()[1])
    return 0
