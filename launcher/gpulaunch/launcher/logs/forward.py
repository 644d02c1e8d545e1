"""Keeps reading the output of processes left running after the launcher itself has ended.

Under torchrun such a process has the launcher's own stdout; here it has a pipe to the agent, and if that were not read
its next line would kill it (SIGPIPE). So a small process keeps reading, writes the rank's files and the console as
before, and exits with the last of the writers.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from gpulaunch.launcher.logs.lines import LineSplitter
from gpulaunch.launcher.loop import linux

FORWARD_COMM = "gpulaunch-logs"
_READ_BYTES = 64 * 1024


@dataclass(kw_only=True)
class ForwardedPipe:
    """One pipe that a process still holds."""

    fd: int
    """Its read end."""
    file_fd: int | None
    """The rank's own file."""
    show_fd: int | None
    """The descriptor on which the console shows the stream; None if it does not."""
    prefix: bytes
    raw: bool
    """Shown unchanged."""
    splitter: LineSplitter


def forward(held: Sequence[ForwardedPipe]) -> int:
    """Start the process; return its pid. The caller closes its own descriptors.

    Raises:
        OSError: it cannot be started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _forward(held)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _forward(held: Sequence[ForwardedPipe]) -> NoReturn:
    try:
        os.setsid()  # keep it from Ctrl-C and the terminal's hangup, like the processes it serves
        linux.set_comm(FORWARD_COMM)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        kept = {fd for one in held for fd in (one.fd, one.file_fd, one.show_fd) if fd is not None}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in kept:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        _pass_on({one.fd: one for one in held})
    finally:
        os._exit(0)


def _pass_on(held: dict[int, ForwardedPipe]) -> None:
    poller = select.poll()
    for fd in held:
        poller.register(fd, select.POLLIN)
    while held:
        for fd, _ in poller.poll():
            one = held[fd]
            try:
                data = os.read(fd, _READ_BYTES)
            except OSError:  # EIO: the last holder of the terminal has closed it
                data = b""
            _write(one.file_fd, data)
            if one.raw:
                _write(one.show_fd, data)
            elif lines := one.splitter.feed(data) or one.splitter.excess() if data else one.splitter.finish():
                _write(one.show_fd, one.prefix + lines.removesuffix(b"\n").replace(b"\n", b"\n" + one.prefix) + b"\n")
            if not data:
                poller.unregister(fd)
                del held[fd]
                if one.show_fd is not None and all(each.show_fd != one.show_fd for each in held.values()):
                    os.close(one.show_fd)  # `x=$(gpulaunch ...)` and ssh wait for its last holder


def _write(fd: int | None, data: bytes) -> None:
    """Write all of it, however long that takes; data that the disk or the reader rejects is lost."""
    with contextlib.suppress(OSError):
        while fd is not None and data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:  # the caller had set its stdout so
                ready = select.poll()
                ready.register(fd, select.POLLOUT)
                ready.poll()
