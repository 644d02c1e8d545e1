"""Measures how fast this host computes what is no large operation: where others share its processor, it may take three
times as long an hour later, without a sign of it in /proc."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Final

_TURNS: Final = 1000
"""A tenth of a millisecond on a slow host."""
_LATEST: Final = 15
"""Measurements of which the median is taken: a single one may have met an interrupt, or a cold cache."""


class Pace:
    """The CPU time of a turn of a loop of Python's, of the latest measurements."""

    def __init__(self, clock_ns: Callable[[], int] = time.thread_time_ns) -> None:
        """`clock_ns`: counts the time that the calling thread runs."""
        self._clock_ns = clock_ns
        self._measured = deque[float](maxlen=_LATEST)

    def measure(self) -> float:
        """Measure once more, and return nanoseconds."""
        _loop(_TURNS)  # what slept has a cold cache
        began = self._clock_ns()
        _loop(_TURNS)
        self._measured.append((self._clock_ns() - began) / _TURNS)
        return median(self._measured)


def _loop(turns: int) -> int:
    total = 0
    for turn in range(turns):
        total += turn
    return total
