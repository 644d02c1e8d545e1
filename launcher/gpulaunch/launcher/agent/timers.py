"""The server of `torch.distributed.elastic.timer`: a rank declares how long a block may take and is killed past that.

`TORCHELASTIC_ENABLE_FILE_TIMER=1` enables it, `TORCHELASTIC_TIMER_FILE` names the pipe, as with torchrun. The messages
are those of torch's own client (elastic/timer/file_based_local_timer.py, version 1), one JSON object a line:

    {"version": 1, "pid": int, "scope_id": str, "expiration_time": Unix time in s, "signal": int}

A negative time releases the scope; a signal of 0 or less has no effect. torch's server kills
itself after the rank; here the rank's end is a failure like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Mapping

from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.loop.loop import Loop, Timer

ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE = "TORCHELASTIC_TIMER_FILE"
HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
"""torch's own server for it does nothing (elastic/agent/server/health_check_server.py): sites replace it."""
_READ_BYTES = 64 * 1024
_MAX_READS = 64
"""A Linux pipe holds 1 MiB at most, unless the limit was raised."""
_LONGEST_BYTES = 4096
"""PIPE_BUF of Linux: the client writes no longer lines."""
_MAX_TIMERS = 100_000
_FURTHEST_S = 1e9
"""From now: 30 years; epoll waits for no longer than a C int of milliseconds anyway."""


def pipe_of(environ: Mapping[str, str], directory: str) -> str:
    """Path of the pipe, by torch's variables, else in `directory`; "" if timers are not enabled."""
    return environ.get(FILE, os.path.join(directory, "timers")) if environ.get(ENABLE) == "1" else ""


class FileTimers:
    """The timers of all ranks of this node."""

    def __init__(self, loop: Loop, path: str, expired: Callable[[int, int, str], None]) -> None:
        """Make the pipe. `expired` gets the pid, the signal that its client chose, and the scope.

        Raises:
            UsageError: it cannot be made.
        """
        self._loop = loop
        self._path = path
        self._expired = expired
        self._timers: dict[tuple[int, str], Timer] = {}
        self._rest = b""
        try:
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISFIFO(os.lstat(path).st_mode):
                    raise UsageError(f"{FILE}: {path} exists and is not a named pipe; use another path")
                os.unlink(path)  # of a launcher that was killed
            os.mkfifo(path, 0o600)
            # Opened for writing, too: without a writer it would always be readable (end of file).
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as err:
            raise UsageError(f"{FILE}: cannot create the pipe {path}: {err.strerror}; use another path") from err
        loop.watch_read(self._fd, self._read)

    def clear(self) -> None:
        """Forget all timers and the pipe's content: the kernel may give a new rank the pid of a dead one."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._rest = b""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MAX_READS):
                os.read(self._fd, _READ_BYTES)

    def close(self) -> None:
        """Forget all timers, and remove the pipe."""
        self.clear()
        self._loop.unwatch_read(self._fd)
        os.close(self._fd)
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            *lines, rest = (self._rest + os.read(self._fd, _READ_BYTES)).split(b"\n")
            self._rest = rest[-_LONGEST_BYTES:]
            for line in lines:
                # Lines that are not torch's are ignored.
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    self._hear(json.loads(line))

    def _hear(self, said: dict[str, object]) -> None:
        pid, scope, expires_s, signum = said["pid"], said["scope_id"], said["expiration_time"], said["signal"]
        if not (isinstance(pid, int) and isinstance(scope, str) and isinstance(signum, int)):
            return
        if not (0 < pid < 1 << 31 and signum < signal.NSIG):
            return
        if not (isinstance(expires_s, (int, float)) and expires_s < time.time() + _FURTHEST_S):
            return
        known = self._timers.pop((pid, scope), None)
        if known is not None:
            known.cancel()
        if expires_s >= 0 and len(self._timers) < _MAX_TIMERS:
            due_s = self._loop.now() + expires_s - time.time()
            self._timers[pid, scope] = self._loop.call_at(due_s, lambda: self._expire(pid, scope, signum))

    def _expire(self, pid: int, scope: str, signum: int) -> None:
        del self._timers[pid, scope]
        if signum > 0:
            self._expired(pid, signum, scope)
