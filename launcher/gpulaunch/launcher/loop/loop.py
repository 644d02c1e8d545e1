"""The only place that waits: epoll over pidfds, pipes, sockets and signals, and a heap of timers.

Everything the agent learns arrives here as a callback: a descriptor became ready, a process ended, a signal came, a
deadline passed. Nothing polls. Callbacks run one after another on the only thread, so they must not block.

Why SIGCHLD as well as pidfds: the agent is a child subreaper, so processes that it never started (the orphans of its
ranks) become its children when their parents die and must be reaped. A pidfd shows which process ended;
SIGCHLD shows that some process did.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

_READ = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
_WRITE = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
# Exits of processes without a callback yet: a rank can die before the fork server's answer names it.
_MAX_UNCLAIMED = 4096


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a process ended: `code` or `signal`, one of them None; memory and CPU time as wait4(2) gives them."""

    pid: int
    code: int | None
    signal: int | None
    at_s: float
    max_rss_bytes: int
    cpu_s: float


class Timer:
    """One deadline; `cancel()` disarms it."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Never call back; harmless after it has fired."""
        self.callback = None


class Loop:
    """One epoll instance with its callbacks. It takes the process's signal handling; `close()` gives it back."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._children: dict[int, tuple[int, Callable[[Exit], None]]] = {}  # pid -> pidfd, callback
        self._unclaimed: dict[int, Exit] = {}
        self._on_orphan: Callable[[Exit], None] | None = None
        self._signals: dict[int, Callable[[int], None]] = {}
        self._old_handlers: dict[int, object] = {}
        self._running = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self.watch_read(self._wake_read, self._drain_signals)
        self.on_signal(signal.SIGCHLD, lambda _: self._reap_any())

    def now(self) -> float:
        """Monotonic seconds; the only clock used for decisions."""
        return time.monotonic()

    # -- descriptors

    def watch_read(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back while `fd` is readable, hung up or broken. Raises PermissionError for a regular file (epoll(7))."""
        self._register(fd, reader=callback)

    def watch_write(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back while `fd` can be written. Raises PermissionError for a regular file."""
        self._register(fd, writer=callback)

    def unwatch_read(self, fd: int) -> None:
        """Stop calling back for reading; harmless when not watched."""
        if self._readers.pop(fd, None) is not None:
            self._update(fd, known=True)

    def unwatch_write(self, fd: int) -> None:
        """Stop calling back for writing; harmless when not watched."""
        if self._writers.pop(fd, None) is not None:
            self._update(fd, known=True)

    def _register(
        self, fd: int, *, reader: Callable[[], None] | None = None, writer: Callable[[], None] | None = None
    ) -> None:
        known = fd in self._readers or fd in self._writers
        wanted = (_READ if reader or fd in self._readers else 0) | (_WRITE if writer or fd in self._writers else 0)
        if known:
            self._epoll.modify(fd, wanted)
        else:
            self._epoll.register(fd, wanted)
        if reader:
            self._readers[fd] = reader
        if writer:
            self._writers[fd] = writer

    def _update(self, fd: int, *, known: bool) -> None:
        wanted = (_READ if fd in self._readers else 0) | (_WRITE if fd in self._writers else 0)
        # A descriptor closed before it was unwatched has already left the epoll set.
        with contextlib.suppress(OSError, ValueError):
            if wanted:
                self._epoll.modify(fd, wanted)
            elif known:
                self._epoll.unregister(fd)

    # -- time

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        """Call back once at monotonic `when_s`, or at the next turn if that has passed."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (when_s, next(self._order), timer))
        return timer

    # -- processes

    def watch_pid(self, pid: int, callback: Callable[[Exit], None]) -> None:
        """Call back once, when child `pid` has ended and been reaped; also when it already has."""
        early = self._unclaimed.pop(pid, None)
        if early is not None:
            self.call_at(self.now(), lambda: callback(early))
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as err:
            raise OSError(err.errno, f"cannot watch process {pid}: {os.strerror(err.errno or 0)}") from err
        self._children[pid] = (pidfd, callback)
        self.watch_read(pidfd, lambda: self._reap(pid))

    def on_orphan(self, callback: Callable[[Exit], None]) -> None:
        """Call back when a child without a callback has ended: an adopted one, or a rank not yet announced."""
        self._on_orphan = callback

    def forget_unclaimed(self) -> None:
        """Drop the exits without a callback: call it when no start is under way."""
        self._unclaimed.clear()

    def _reap(self, pid: int) -> None:
        """Reap one watched child if it has ended."""
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done == 0:
            return
        pidfd, callback = self._children.pop(pid)
        self.unwatch_read(pidfd)
        os.close(pidfd)
        callback(self._exit_of(pid, status, usage.ru_maxrss, usage.ru_utime + usage.ru_stime))

    def _reap_any(self) -> None:
        """Reap every ended child, watched or adopted."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in self._children:
                self._reap(ended.si_pid)
                continue
            done, status, usage = os.wait4(ended.si_pid, os.WNOHANG)
            if done == 0:
                return
            exit_ = self._exit_of(done, status, usage.ru_maxrss, usage.ru_utime + usage.ru_stime)
            if len(self._unclaimed) < _MAX_UNCLAIMED:
                self._unclaimed[done] = exit_
            if self._on_orphan is not None:
                self._on_orphan(exit_)

    def _exit_of(self, pid: int, status: int, max_rss_kib: int, cpu_s: float) -> Exit:
        signaled = os.WIFSIGNALED(status)
        return Exit(
            pid=pid,
            code=None if signaled else os.WEXITSTATUS(status),
            signal=os.WTERMSIG(status) if signaled else None,
            at_s=self.now(),
            max_rss_bytes=max_rss_kib * 1024,
            cpu_s=cpu_s,
        )

    # -- signals

    def on_signal(self, signum: int, callback: Callable[[int], None]) -> None:
        """Call back on the loop when `signum` arrives. The C handler only wakes the loop: no work in a handler."""
        if signum not in self._old_handlers:
            self._old_handlers[signum] = signal.signal(signum, _nothing)
        self._signals[signum] = callback

    def _drain_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            # Each byte is a signal number; repeated signals are each reported, in order, SIGCHLD only once.
            for signum in dict.fromkeys(os.read(self._wake_read, 4096)):
                callback = self._signals.get(signum)
                if callback is not None:
                    callback(signum)

    # -- turning

    def run(self) -> None:
        """Run until `stop()`."""
        self._running = True
        while self._running:
            self.turn()

    def stop(self) -> None:
        """Return from `run()` after the current callback."""
        self._running = False

    def turn(self, at_most_s: float | None = None) -> None:
        """Wait until something happens or a timer is due, at most `at_most_s` seconds, and run the callbacks."""
        waits = [wait_s for wait_s in (self._timeout_s(), at_most_s) if wait_s is not None]
        try:
            ready = self._epoll.poll(min(waits, default=-1))
        except InterruptedError:
            ready = []
        for fd, mask in ready:
            # A callback may have unwatched a descriptor that this same poll reported.
            reader = self._readers.get(fd)
            if reader is not None and mask & _READ:
                reader()
            writer = self._writers.get(fd)
            if writer is not None and mask & _WRITE:
                writer()
        due = self.now()
        while self._timers and self._timers[0][0] <= due:
            timer = heapq.heappop(self._timers)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()

    def _timeout_s(self) -> float | None:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return max(0.0, self._timers[0][0] - self.now())

    def close(self) -> None:
        """Restore signal handling and close what the loop opened. Children are not touched."""
        signal.set_wakeup_fd(self._old_wakeup)
        for signum, old in self._old_handlers.items():
            signal.signal(signum, old if callable(old) or isinstance(old, int) else signal.SIG_DFL)
        for pidfd, _ in self._children.values():
            os.close(pidfd)
        self._epoll.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """The Python-level handler: the wakeup descriptor has already notified the loop."""
