"""Calls a function in a forked child, so that nothing it waits for blocks the loop.

A file system or a driver may not respond for minutes. The child is a fork without exec, so it starts in a millisecond
and has what it needs in memory. It keeps nothing of the agent's: no descriptor but its pipe, no signal handler, no
cleanup at exit. It dies with the agent, or at its deadline.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import NoReturn

from gpulaunch.launcher.loop import linux
from gpulaunch.launcher.loop.loop import Exit, Loop, Timer

_ANSWER_CAP_BYTES = 64 << 20
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

Answered = Callable[[bytes | None, str], None]
"""Called once with the answer, or with None and the reason: `late`, or how the child ended."""


class ForkedCall:
    """One call at a time."""

    def __init__(self, loop: Loop, *, comm: str) -> None:
        """`comm`: the child's name, as ps shows it (15 bytes)."""
        self._loop = loop
        self._comm = comm
        self.pid: int | None = None
        """The child's pid, while it runs."""
        self._done: Answered | None = None
        self._read = -1
        self._answer = bytearray()
        self._timer: Timer | None = None

    def ask(self, question: Callable[[], bytes], within_s: float, done: Answered) -> None:
        """Run the question in a child; cancels a running one. The question must not raise: that ends the child.

        Raises:
            OSError: no child can be started.
        """
        self.cancel()
        self._read, write = os.pipe2(os.O_CLOEXEC)
        # A signal between fork and reset would reach the agent's wakeup pipe from here as well.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        agent_pid = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                _answer_and_exit(question, write, agent_pid, self._comm)
        except OSError:
            os.close(self._read)
            self._read = -1
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(write)
        os.set_blocking(self._read, False)
        self.pid, self._done, self._answer = pid, done, bytearray()
        self._loop.watch_read(self._read, self._on_readable)
        self._loop.watch_pid(pid, self._on_exit)
        self._timer = self._loop.call_at(self._loop.now() + within_s, self._on_late)

    def cancel(self) -> None:
        """Kill the child, if one runs; `done` is never called."""
        self._done = None
        self._kill()
        self.pid = None
        self._close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_readable(self) -> None:
        try:
            data = os.read(self._read, 1 << 20)
        except BlockingIOError:
            return
        self._answer += data
        if len(self._answer) > _ANSWER_CAP_BYTES:
            self._kill()
        if not data:
            self._close()

    def _on_late(self) -> None:
        """Stop waiting: a child that is stuck in the kernel outlives even SIGKILL."""
        done = self._done
        self.cancel()
        if done is not None:
            done(None, "late")

    def _on_exit(self, exit_: Exit) -> None:
        if exit_.pid != self.pid:
            return  # a cancelled one
        while self._read >= 0:  # what it wrote before it ended; its end of the pipe is closed, so this does not wait
            self._on_readable()
        done, answer = self._done, bytes(self._answer)
        self.pid = None  # reaped: the kernel may reuse its number
        self.cancel()
        if done is None:
            return
        if exit_.code == 0 and len(answer) <= _ANSWER_CAP_BYTES:
            done(answer, "")
        else:
            done(None, f"signal {exit_.signal}" if exit_.signal is not None else f"exit code {exit_.code}")

    def _kill(self) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own

    def _close(self) -> None:
        if self._read >= 0:
            self._loop.unwatch_read(self._read)
            os.close(self._read)
            self._read = -1


def _answer_and_exit(question: Callable[[], bytes], write: int, agent_pid: int, comm: str) -> NoReturn:
    """The child's main function. Signals are blocked; no code of the agent may run here, and nothing returns."""
    code = 1
    try:
        linux.die_with_parent(agent_pid)
        linux.set_comm(comm)
        signal.set_wakeup_fd(-1)
        for signum in signal.valid_signals():
            if callable(signal.getsignal(signum)):
                signal.signal(signum, signal.SIG_DFL)
        for signum in _IGNORED:  # meant for the agent, which kills this process when it is no longer needed
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.dup2(write, 3, inheritable=False)  # first: if the agent's own were closed, the pipe may be one of 0..2
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        os.closerange(4, 1 << 20)
        _forget_agents_objects()
        data = question()
        while data:
            data = data[os.write(3, data) :]
        code = 0
    finally:
        os._exit(code)


def _forget_agents_objects() -> None:
    """Never collect the agent's objects: their destructors would close descriptors that now belong to this process."""
    import gc

    gc.freeze()
