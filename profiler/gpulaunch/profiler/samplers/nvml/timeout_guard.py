"""Runs readings that may hang in a helper thread: one call at a time, and callers wait only briefly.

A faulty driver keeps its caller in the kernel for minutes or forever, where neither a signal nor a Python timeout
reaches it. A thread can be left there: ctypes releases the GIL meanwhile, so everything else runs on. But there must
not be another hung thread each second, so while one call is pending no other is made, for any caller. The thread is a
daemon: at its end the sidecar does not wait for the driver.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from gpulaunch.profiler.record import Reading, Sampler

T = TypeVar("T")
_PATIENCE_S: Final = 0.5  # how long it may delay the other collectors, once
_GIVEN_UP_S: Final = 10.0  # after this long it counts as absent, not late
_GOODBYE_S: Final = 0.5


class _Call(Generic[T]):
    """One call, and its result once it has returned."""

    def __init__(self, what: Callable[[], T], started_s: float) -> None:
        self.started_s = started_s
        self._what = what
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._back = threading.Event()

    def make(self) -> None:
        try:
            self._result.append(self._what())
        except BaseException as error:  # raised again in the caller
            self._error = error
        self._back.set()

    def is_back(self, within_s: float = 0.0) -> bool:
        return self._back.wait(within_s)

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result[0]


class Helper:
    """The thread; started at the first call, so a node without a driver has none."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._newest: _Call[Any] | None = None

    def start(self, what: Callable[[], T]) -> _Call[T] | None:
        """Call `what` in the thread; None while another call is pending."""
        if self.busy_s() is not None:
            return None
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="gpulaunch-nvml", daemon=True)
            thread.start()  # raises if the control group's thread limit is reached; the next reading tries again
            self._thread = thread
        call = _Call(what, self.clock())
        self._newest = call
        self._calls.put(call)
        return call

    def busy_s(self) -> float | None:
        """Return how long the pending call has been running; None if there is none."""
        if self._newest is None or self._newest.is_back():
            return None
        return self.clock() - self._newest.started_s

    def close(self) -> None:
        """End the thread, or abandon it if its call does not return."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(_GOODBYE_S)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.make()


class TimeoutGuard(Generic[T]):
    """A sampler whose readings are made by the helper. A late result is used at the next reading.

    Until there is a new result the values are the old ones, with their age in `late_s`; after a while the source counts
    as absent.
    """

    def __init__(
        self, sampler: Sampler[T], helper: Helper, *, what: str, nothing: T, patience_s: float = _PATIENCE_S
    ) -> None:
        """`what`: name of the source, for messages. `nothing`: the values before the first result."""
        self._sampler = sampler
        self._helper = helper
        self._what = what
        self._nothing = nothing
        self.patience_s = patience_s
        """How long a reading may delay its caller."""
        self._out: _Call[Reading[T]] | None = None
        self._newest: Reading[T] | None = None
        self._newest_asked_s = 0.0

    def read(self, now: float) -> Reading[T]:
        """Return the newest reading; wait briefly for a fresh one, unless the pending call was waited for already."""
        self._take(0.0)  # a result too late for the previous reading
        if self._out is None:
            self._out = self._helper.start(lambda: self._sampler.read(self._helper.clock()))
            if self._out is not None and self._take(self.patience_s) and self._newest is not None:
                return self._newest
        waited_s = self._helper.busy_s() or 0.0
        age_s = now - self._newest_asked_s if self._newest is not None else waited_s
        words = f"{self._what} has not answered for {waited_s:.1f} s"
        return Reading(
            values=self._nothing if self._newest is None else self._newest.values,
            absent=words if age_s >= _GIVEN_UP_S else "",
            errors=(words,),
            late_s=age_s,
        )

    def _take(self, within_s: float) -> bool:
        """Take the result, if the call has returned."""
        call = self._out
        if call is None or not call.is_back(within_s):
            return False
        self._out = None
        self._newest = call.result()
        self._newest_asked_s = call.started_s
        return True
