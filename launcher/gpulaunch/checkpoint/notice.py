"""Requests to this process from outside: to save and end, or to save and continue.

Under gpulaunch the node's agent writes them to the control segment; elsewhere a SIGTERM means the end. In both cases a
SIGTERM handler is set if the program has none: otherwise a signalled rank dies before its next step boundary.

But gpulaunch also sends SIGTERM to ranks that must exit because another one has failed, and those should exit at once.
They mostly wait for the failed one in a collective, where Python runs no handler. So under gpulaunch a thread receives
the signal too, and ends the process unless the agent announces a preemption.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType

from gpulaunch.profiler.channel.control import ControlReader

TELL_S = 2.0
"""How long after a SIGTERM the agent may take to say what it means. It does so before it sends one; but a job manager
that signals all processes, like Slurm, signals agent and ranks at once, and the agent of a busy node has to wait for a
core first (more than 0.1 s, on two cores with ten jobs)."""
_LOOK_S = 0.01


class Notice:
    """A few memory loads at each step boundary."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._control: ControlReader | None = None
        if environ.get("GPULAUNCH_CONTROL"):
            self._control = ControlReader(environ["GPULAUNCH_CONTROL"])
        self._signalled = False
        self._listens = False
        self._registered = False
        self._pipe: tuple[int, int] | None = None

    @property
    def preempted(self) -> bool:
        """Whether to save and end."""
        if self._control is not None:
            return self._control.preempted
        return self._signalled

    @property
    def save_requests(self) -> int:
        """The number of save requests."""
        return self._control.save_requests if self._control is not None else 0

    def listen(self) -> None:
        """From here on a SIGTERM does not end the process at once, unless the program has its own handling."""
        if self._listens or not _is_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._listens = True
        if not self._registered:
            # A dataloader worker is ended with SIGTERM and waited for: it must not inherit any of this.
            os.register_at_fork(after_in_child=self._forget)
            self._registered = True
        if self._control is not None and self._pipe is None:
            self._pipe = read, write = os.pipe()
            os.set_blocking(write, False)
            threading.Thread(target=self._hear, args=(read,), name="gpulaunch-notice", daemon=True).start()
        if self._pipe is not None:
            # The C part of Python's handler writes the signal's number there, whatever the main thread does.
            before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            if before != -1:  # e.g. asyncio's: then a rank that must exit is killed a moment later
                signal.set_wakeup_fd(before)

    def unlisten(self) -> None:
        """From here on there is no next step boundary: a SIGTERM ends the process."""
        if not self._listens or not _is_main_thread():
            return
        self._listens = False
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._pipe is not None:
            before = signal.set_wakeup_fd(-1)
            if before not in (-1, self._pipe[1]):
                signal.set_wakeup_fd(before)

    def _on_sigterm(self, _signum: int, _frame: FrameType | None) -> None:
        self._signalled = True

    def _hear(self, read: int) -> None:
        """Wait for a SIGTERM, then for the agent's announcement; without one, end the process."""
        while numbers := os.read(read, 64):
            if signal.SIGTERM not in numbers:
                continue
            if self._is_to_leave():
                # Python lets only its main thread set a handler, and that one waits for a lost rank.
                ctypes.CDLL(None).signal(signal.SIGTERM, 0)  # SIG_DFL
                os.kill(os.getpid(), signal.SIGTERM)

    def _is_to_leave(self) -> bool:
        """Whether a SIGTERM means to exit, once the agent has said so; True if it says nothing."""
        control, waits = self._control, threading.Event()
        if control is None:
            return False
        until_s = time.monotonic() + TELL_S
        while not (control.preempted or control.leaves) and time.monotonic() < until_s:
            waits.wait(_LOOK_S)
        return not control.preempted

    def _forget(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            self.unlisten()
        for end in self._pipe or ():
            os.close(end)
        self._pipe = None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
