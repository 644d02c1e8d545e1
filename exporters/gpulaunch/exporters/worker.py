"""A worker thread that processes the newest item it is given, without blocking its callers.

It touches files that may be on a network file system, which may hang: a caller is then blocked in the kernel, for
minutes or for ever. So only a separate thread touches them, which may be abandoned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

_T = TypeVar("_T")

_LATE_S: Final = 10.0
"""Work that takes longer is late."""


class Worker(Generic[_T]):
    """Owns the thread, a daemon, which starts with the first item."""

    def __init__(
        self, name: str, work: Callable[[_T | None, bool], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`work`: takes the newest item and whether it is the last call; that may have no item (None). Never raises."""
        self._name = name
        self._work = work
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards the fields below
        self._newest: _T | None = None
        self._ending = False
        self._began_s: float | None = None
        self.overtaken = 0
        """Number of items skipped because a newer one came before the thread was ready."""

    def give(self, newest: _T) -> bool:
        """Hand over an item without blocking; False if no thread could be started: the next call retries."""
        with self._changed:
            if self._ending:
                return True
            self.overtaken += self._newest is not None
            self._newest = newest
            self._changed.notify()
        return self._thread is not None or self._start()

    @property
    def late_s(self) -> float:
        """How long the current work has been running; 0 while that is not too long."""
        with self._changed:
            taken_s = 0.0 if self._began_s is None else self._clock() - self._began_s
        return taken_s if taken_s > _LATE_S else 0.0

    def close(self, within_s: float) -> bool:
        """Make it work one last time; return whether that finished in time."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the control group is at its thread limit
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        ending = False
        while not ending:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._ending)
                newest, self._newest = self._newest, None
                ending = self._ending
                self._began_s = self._clock()
            self._work(newest, ending)
            with self._changed:
                self._began_s = None
