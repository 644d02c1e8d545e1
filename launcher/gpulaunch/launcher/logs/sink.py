"""Writes to a descriptor that another process reads, without ever waiting for the reader.

Setting O_NONBLOCK on an inherited stdout would set it for the user's shell too: the flag belongs to the open file
description (open(2)), which both share. So:

- OWN: for a terminal or a pipe, a description of our own, opened through /proc/self/fd, is non-blocking.
- SHARED: where that is refused (another user's terminal after `su`) and for sockets, at most PIPE_BUF bytes are written
  each time the kernel reports room: a pipe that is ready for writing has room for that much (pipe(7)).
- DIRECT: regular files and plain devices such as /dev/null, which epoll refuses and which do not make writers wait.
"""

from __future__ import annotations

import os
import select
import stat
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

from gpulaunch.launcher.loop.loop import Loop

_WRITE_BYTES = 256 * 1024
_PIPE_BUF = 4096  # Linux, pipe(7)


class _Way(Enum):
    OWN = "own"
    SHARED = "shared"
    DIRECT = "direct"


class Sink:
    """A queue of bytes before a descriptor. If the descriptor fails, `why_off` says how, and new data is dropped."""

    def __init__(self, loop: Loop, fd: int, *, on_drain: Callable[[], None], on_off: Callable[[OSError], None]) -> None:
        self.waiting_bytes = 0
        self.why_off: OSError | None = None
        self._loop = loop
        self._on_drain = on_drain
        self._on_off = on_off
        self._queue: deque[bytes] = deque()
        self._watched = False
        self._fd = fd
        try:
            self._fd, self._way = _open_way(fd)
        except OSError as err:  # closed before we were started: `gpulaunch >&-`
            self.why_off, self._way = err, _Way.SHARED

    def put(self, data: bytes) -> None:
        """Write as soon as the reader makes room."""
        if self.why_off is not None or not data:
            return
        self._queue.append(data)
        self.waiting_bytes += len(data)
        if self._way is _Way.DIRECT:
            self.push()
        elif not self._watched:
            self._watched = True
            self._loop.watch_write(self._fd, self.push)

    def push(self) -> None:
        """Write as much as the kernel takes now."""
        if self._queue and (self._way is not _Way.SHARED or self._writable(0.0)):
            self._write()
        if not self._queue:
            self._unwatch()
        self._on_drain()

    def flush(self, deadline_s: float) -> None:
        """Wait for the reader until `time.monotonic()` is `deadline_s`; only at the end of a run."""
        while self._queue:
            left_s = deadline_s - time.monotonic()
            if self._way is not _Way.DIRECT and (left_s <= 0.0 or not self._writable(left_s)):
                break
            self._write()
        if not self._queue:
            self._unwatch()

    def close(self) -> None:
        """Drop pending data and release the descriptor."""
        self._drop()
        if self._way is _Way.OWN:
            os.close(self._fd)
            self._way = _Way.SHARED
        self.why_off = self.why_off or OSError("closed")

    def _writable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(timeout_s * 1000))

    def _write(self) -> None:
        """One write(2)."""
        data = self._queue.popleft()
        if self._queue and len(data) < _WRITE_BYTES:
            parts, size = [data], len(data)
            while self._queue and size < _WRITE_BYTES:
                parts.append(self._queue.popleft())
                size += len(parts[-1])
            data = b"".join(parts)
        try:
            written = os.write(self._fd, data[:_PIPE_BUF] if self._way is _Way.SHARED else data)
        except BlockingIOError:
            written = 0
        except OSError as err:
            # EPIPE: the reader has gone; EIO: the terminal has. Both are permanent. A full disk: see the message.
            self.why_off = err
            self._drop()
            self._on_off(err)
            return
        self.waiting_bytes -= written
        if written < len(data):
            self._queue.appendleft(data[written:])

    def _drop(self) -> None:
        self._queue.clear()
        self.waiting_bytes = 0
        self._unwatch()

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.unwatch_write(self._fd)


def _open_way(fd: int) -> tuple[int, _Way]:
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode) or os.isatty(fd):
        try:
            own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return fd, _Way.SHARED
        return own, _Way.OWN
    return fd, _Way.SHARED if stat.S_ISSOCK(mode) else _Way.DIRECT
