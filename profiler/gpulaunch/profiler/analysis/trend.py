"""Detects steady growth: a robust straight line through a few points, and a bounded series of points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Generic, TypeVar

from gpulaunch.profiler.analysis.stats import median

T = TypeVar("T")

_STILL: Final = 0.5
"""Growth is steady if its later half grows at this part of the overall rate at least: caches fill and stop."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A steady growth."""

    per_x: float
    total: float
    """From the first point to the last, on the line."""


def growth_of(points: Sequence[tuple[float, float]]) -> Growth | None:
    """Return the growth of points (x, y) in the order of x; None if they do not grow steadily.

    The slope is the median of those between all pairs (Theil and Sen): up to a third of the points may be outliers.
    """
    whole, later = _slope(points), _slope(points[len(points) // 2 :])
    if whole is None or later is None or whole <= 0 or later < _STILL * whole:
        return None
    return Growth(per_x=whole, total=whole * (points[-1][0] - points[0][0]))


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x2 > x1]
    return median(slopes) if slopes else None


class Series(Generic[T]):
    """A bounded number of points over any time: when full, every other point is dropped, and from then on skipped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._every = 1
        self._turn = 0
        self._points: list[T] = []

    def add(self, point: T) -> None:
        """Take the next point, or skip it."""
        self._turn += 1
        if self._turn < self._every:
            return
        self._turn = 0
        self._points.append(point)
        if len(self._points) >= self._most:
            del self._points[1::2]
            self._every *= 2

    @property
    def points(self) -> tuple[T, ...]:
        """The kept points, the oldest first."""
        return tuple(self._points)
