"""Measures GPU time with CUDA events: recorded at edges and around copies, and read when the GPU has passed them.

An event is enqueued on the stream like any other work, and `query()` returns whether the GPU has reached it: nothing
blocks. The time between two events is GPU time, idle time included, on the stream that was current.

One step of `TIMED_EVERY` is timed, because events have overhead. The number of timed steps is published with the times
of phases; times of copies are multiplied, so that they match the counts of all copies.

Nothing is recorded or queried while the current stream captures a graph: a recorded event would be replayed, and a
query would end the capture.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

from gpulaunch.profiler.channel.quantities import GpuTime
from gpulaunch.profiler.probe.account import BACKWARD, FORWARD, OPTIMIZER, OTHER

TIMED_EVERY: Final = 16
"""Steps of which one is timed on the GPU; not the first, which is not typical."""

_MOST_EVENTS: Final = 128  # of this process; a step with more edges and copies than that is not timed

_WORD_OF: Final = {
    FORWARD: GpuTime.forward_ns_total,
    BACKWARD: GpuTime.backward_ns_total,
    OPTIMIZER: GpuTime.optimizer_ns_total,
}

Mark = tuple[int, Any]
"""The phase that begins at an edge, and the event recorded there."""


class Events:
    """A pool of reusable CUDA events, all on one GPU."""

    __slots__ = ("_cuda", "_device", "_free", "_made")

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._device = -1
        self._free: list[Any] = []
        self._made = 0

    def record(self) -> Any | None:
        """An event, recorded now in the current stream; None if not possible: the stream captures a graph, the current
        GPU is another than the first time, or all events are in use."""
        cuda = self._cuda
        device = cuda.current_device()
        if self._device < 0:
            self._device = device
        if device != self._device or cuda.is_current_stream_capturing():
            return None
        if self._free:
            event = self._free.pop()
        elif self._made < _MOST_EVENTS:
            self._made += 1
            event = cuda.Event(enable_timing=True)
        else:
            return None
        event.record()
        return event

    def is_here(self, device: int) -> bool:
        """True for the index of the GPU that the events are of."""
        return device == self._device

    def give_back(self, *events: Any) -> None:
        """Return events to the pool, whether or not the GPU has passed them."""
        self._free.extend(events)


class GpuClock:
    """Times phases and copies on the GPU, in the steps that it chooses. For the training thread only."""

    __slots__ = ("_copies", "_cuda", "_events", "_marks", "_steps", "_words", "timing")

    def __init__(self, words: memoryview, cuda: Any) -> None:
        self._words = words
        self._cuda = cuda
        self._events = Events(cuda)
        self._marks: list[Mark] = []  # of the current step
        self._steps: deque[list[Mark]] = deque()  # complete ones that the GPU has not passed yet
        self._copies: deque[tuple[Any, Any, Callable[[int], None]]] = deque()
        self.timing = False
        """Whether the current step is timed."""

    def step(self, steps: int) -> bool:
        """This many steps have ended. True: the next one is timed, and `edge` must be called."""
        self.edge(OTHER)
        if self.timing:
            self._steps.append(self._marks)
            self._marks = []
            self.timing = False
        if self._steps or self._copies:
            self._read()
        if steps % TIMED_EVERY == TIMED_EVERY // 2 and self._cuda.is_initialized():
            self.timing = True
            self.edge(OTHER)
        return self.timing

    def edge(self, phase: int) -> None:
        """A phase begins."""
        if not self.timing:
            return
        event = self._events.record()
        if event is not None:
            self._marks.append((phase, event))
            return
        self.drop()  # this step cannot be timed completely

    def drop(self) -> None:
        """Stop timing the current step."""
        self.timing = False
        self._events.give_back(*(event for _, event in self._marks))
        self._marks = []

    def copy_begins(self) -> Any | None:
        """A possible copy begins. Pass the result to one of the two methods below; None: it is not timed."""
        return self._events.record() if self.timing else None

    def copy_ended(self, began: Any, device: int, told: Callable[[int], None]) -> None:
        """It was a copy, to or from this GPU; `told` is called with its nanoseconds once they are known."""
        ended = self._events.record() if self._events.is_here(device) else None
        if ended is None:
            self._events.give_back(began)
        else:
            self._copies.append((began, ended, told))

    def no_copy(self, began: Any) -> None:
        """It was not a copy."""
        self._events.give_back(began)

    def _read(self) -> None:
        """Process the events that the GPU has passed by now."""
        if self._cuda.is_current_stream_capturing():
            return
        while self._copies and self._copies[0][1].query():
            began, ended, told = self._copies.popleft()
            told(_elapsed_ns(began, ended))
            self._events.give_back(began, ended)
        while self._steps and self._steps[0][-1][1].query():
            self._enter(self._steps.popleft())

    def _enter(self, marks: list[Mark]) -> None:
        words = self._words
        for (phase, began), (_, ended) in pairwise(marks):
            word = _WORD_OF.get(phase)
            if word is not None:
                words[word] += _elapsed_ns(began, ended)
        words[GpuTime.step_ns_total] += _elapsed_ns(marks[0][1], marks[-1][1])
        words[GpuTime.steps] += 1
        self._events.give_back(*(event for _, event in marks))


def _elapsed_ns(began: Any, ended: Any) -> int:
    """The GPU's time between two events that it has passed; 0 if streams passed them in the opposite order."""
    elapsed_ms: float = began.elapsed_time(ended)
    return max(0, round(1e6 * elapsed_ms))
