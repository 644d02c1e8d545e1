"""The threads that talk to etcd: one takes turns, the other waits for changes; both wake the loop by a pipe."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable

from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.launcher.rendezvous.etcd_client import EtcdClient, EtcdError
from gpulaunch.launcher.rendezvous.etcd_session import Told

TURN_S = 1.0
"""Between two turns, if no key changes."""


class _Bell:
    """Wakes the loop from another thread."""

    def __init__(self, loop: Loop, on_ring: Callable[[], None]) -> None:
        self._loop = loop
        self._on_ring = on_ring
        self._lock = threading.Lock()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        loop.watch_read(self._read_fd, self._rung)

    def ring(self) -> None:
        """From any thread; harmless when it is closed."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._write_fd >= 0:
                os.write(self._write_fd, b".")

    def close(self) -> None:
        """Ring no more."""
        with self._lock:
            if self._write_fd >= 0:
                self._loop.unwatch_read(self._read_fd)
                os.close(self._read_fd)
                os.close(self._write_fd)
                self._write_fd = -1

    def _rung(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)
        self._on_ring()


class Worker:
    """A thread that does one thing after another; what came of it goes to the loop."""

    def __init__(self, loop: Loop, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._jobs: queue.SimpleQueue[
            tuple[Callable[[], Told | None], Callable[[Told | Exception], None] | None] | None
        ]
        self._jobs = queue.SimpleQueue()
        self._results: deque[Callable[[], None]] = deque()
        self._bell = _Bell(loop, self._rung)
        self._thread = threading.Thread(target=self._work, daemon=True, name="etcd")

    def start(self) -> None:
        """Before anything is done."""
        self._thread.start()

    def do(self, job: Callable[[], Told], on_end: Callable[[Told | Exception], None]) -> None:
        """Call back with what `job` returns or raises."""
        self._jobs.put((job, on_end))

    def stop(self) -> None:
        """Call back no more."""
        self._bell.close()

    def do_last(self, job: Callable[[], None], within_s: float) -> None:
        """Do this when all else is done, and wait for it."""
        done = threading.Event()

        def last() -> None:
            try:
                job()
            finally:
                done.set()

        self._jobs.put((last, None))
        done.wait(within_s)

    def end(self) -> None:
        """End the thread when all is done."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, on_end = item
            result: Told | Exception | None
            try:
                result = job()
            except Exception as err:  # whatever etcd, or what poses as it, has answered
                result = err
            if on_end is not None and result is not None:
                self._results.append(functools.partial(on_end, result))
                self._bell.ring()
        self._on_end()

    def _rung(self) -> None:
        while self._results:
            self._results.popleft()()


class Watcher:
    """A thread that hears of changes at once, so that no node waits for the next turn; without it all is only later."""

    def __init__(self, loop: Loop, client: EtcdClient, turns: EtcdClient, on_change: Callable[[], None]) -> None:
        self._client = client
        self._turns = turns
        self._bell = _Bell(loop, on_change)
        self._ranges: list[dict[str, str]] = []
        self._where: tuple[str, int] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="etcd watch")

    def watch(self, ranges: list[dict[str, str]]) -> None:
        """From now on these, at the member that is asked now."""
        if ranges != self._ranges or self._turns.endpoint != self._where:
            self._ranges, self._where = ranges, self._turns.endpoint
            if self._thread.ident is None:
                self._thread.start()
            self._client.interrupt()

    def stop(self) -> None:
        """Call back no more."""
        self._stopped.set()
        self._bell.close()
        self._client.interrupt()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            ranges = self._ranges
            self._client.follow(self._turns)
            with contextlib.suppress(EtcdError):
                for _ in self._client.watch(ranges):
                    self._bell.ring()
                    if ranges is not self._ranges:
                        break
            self._stopped.wait(0.1 if ranges is not self._ranges else TURN_S)
