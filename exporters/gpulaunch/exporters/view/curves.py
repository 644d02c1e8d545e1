"""Converts rows of a file into curves over one time axis. Pure.

A counter's growth between two rows is spread evenly over the time between them, so intervals need not align with rows.
Where the launcher run changes between two rows, the time between them is unknown: counters restarted. Rank counters
start at 0 after the first sample of the run, and stay constant while the rank is absent: the growth over all intervals
adds up to the final value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpulaunch.exporters.store.frame import Frame
from gpulaunch.exporters.store.series import Key
from gpulaunch.exporters.view.rank_model import Curve


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Equal time intervals."""

    begin_s: float
    interval_s: float
    num_intervals: int

    @property
    def times_s(self) -> tuple[float, ...]:
        """The end of each interval."""
        return tuple(self.begin_s + self.interval_s * (index + 1) for index in range(self.num_intervals))

    def parts(self, begin_s: float, end_s: float) -> Iterator[tuple[int, float]]:
        """Yield every interval that a time range overlaps, and the share of the range in it."""
        if end_s <= begin_s:
            index = math.ceil((end_s - self.begin_s) / self.interval_s) - 1
            if 0 <= index < self.num_intervals:
                yield index, 1.0
            return
        first = max(0, math.floor((begin_s - self.begin_s) / self.interval_s))
        last = min(self.num_intervals - 1, math.ceil((end_s - self.begin_s) / self.interval_s) - 1)
        for index in range(first, last + 1):
            low_s = max(begin_s, self.begin_s + index * self.interval_s)
            high_s = min(end_s, self.begin_s + (index + 1) * self.interval_s)
            if high_s > low_s:
                yield index, (high_s - low_s) / (end_s - begin_s)


@dataclass(frozen=True)
class Growth:
    """The growth of a counter in each interval, and how much of the interval is covered."""

    amounts: list[float]
    covered_s: list[float]

    def per_second(self) -> Curve:
        """The rate."""
        return _known(
            tuple(
                amount / covered if covered > 0 else None
                for amount, covered in zip(self.amounts, self.covered_s, strict=True)
            )
        )


def axis_of(begin_s: float, end_s: float, most_points: int) -> Axis | None:
    """Divide a time range; None if it is too short. No interval is shorter than a second."""
    span_s = end_s - begin_s
    if not 1.0 <= span_s < math.inf:
        return None
    num = max(1, min(most_points, math.floor(span_s)))
    return Axis(begin_s=begin_s, interval_s=span_s / num, num_intervals=num)


class Curves:
    """The rows of one node, as curves by series."""

    def __init__(
        self,
        axis: Axis | None,
        frames: Sequence[Frame],
        keys: tuple[Sequence[Key], Sequence[Key]],
        *,
        first_look_s: float = math.inf,
        highest: Mapping[Key, float] | None = None,
    ) -> None:
        """Take the rows.

        Args:
            axis: the time axis of the curves.
            frames: the rows, oldest first.
            keys: the series by slot, of gauges and of counters.
            first_look_s: time of the first sample of the newest row's run.
            highest: the maxima of some gauges.
        """
        self._axis = axis
        self._first_look_s = first_look_s
        self._highest = highest or {}
        self._frames = frames
        self._gauges = {key: slot for slot, key in enumerate(keys[0])}
        self._counters = {key: slot for slot, key in enumerate(keys[1])}
        self._spread: list[tuple[float, list[tuple[int, float]]]] = []
        """Per row except the first: seconds since the previous one, and the intervals they fall in."""
        self._within: list[list[tuple[int, float]]] = []
        """Per row: the intervals that it falls in."""
        if axis is not None:
            for before, frame in pairwise(frames):
                parts = list(axis.parts(before.end_s, frame.end_s)) if before.run == frame.run else []
                self._spread.append((frame.end_s - before.end_s, parts))
            self._within = [list(axis.parts(frame.begin_s, frame.end_s)) for frame in frames]

    @classmethod
    def none(cls) -> Curves:
        """Return curves without rows."""
        return cls(None, (), ((), ()))

    def growth(self, *key: str) -> Growth | None:
        """Return the growth of a counter; None if it is never known."""
        axis, slot = self._axis, self._counters.get(key)
        if axis is None or slot is None:
            return None
        amounts, covered_s = [0.0] * axis.num_intervals, [0.0] * axis.num_intervals
        known = False
        frames = self._frames
        for (seconds, parts), before, frame in zip(self._spread, frames, frames[1:], strict=False):
            if slot >= len(before.counters) or slot >= len(frame.counters):
                continue
            was, is_ = before.counters[slot], frame.counters[slot]
            if was != was or is_ != is_:  # NaN: unknown
                continue
            grown = is_ - was if is_ >= was else is_
            for index, share in parts:
                amounts[index] += grown * share
                covered_s[index] += seconds * share
                known = True
        return Growth(amounts, covered_s) if known else None

    def growth_from_0(self, *key: str) -> Growth | None:
        """Return the growth of a rank counter; None if it is never known."""
        axis, slot = self._axis, self._counters.get(key)
        if axis is None or slot is None:
            return None
        amounts, touched = [0.0] * axis.num_intervals, [False] * axis.num_intervals
        last, run, since_s = math.nan, -1, axis.begin_s
        for index, frame in enumerate(self._frames):
            value = frame.counters[slot] if slot < len(frame.counters) else math.nan
            known = value == value  # NaN: the rank does not exist (yet)
            parts = self._spread[index - 1][1] if index else []
            if frame.run != run:
                run, since_s = frame.run, frame.end_s
                is_first = frame.begin_s < self._first_look_s <= frame.end_s
                if is_first and frame.looks > 1:
                    last, parts, since_s = 0.0, self._within[index], frame.begin_s
                else:  # unknown before the first sample, or if that is not here
                    last, parts = value if known or not is_first else 0.0, []
            if known:
                grown = 0.0 if last != last else value - last if value >= last else value
                last = value
                for at, share in parts:
                    amounts[at] += grown * share
                    touched[at] = True
        if not any(touched):
            return None
        # An interval is covered as far as there are rows, whether or not the rank existed.
        until_s = self._frames[-1].end_s
        ends_s = axis.times_s
        covered_s = [max(0.0, min(end_s, until_s) - max(end_s - axis.interval_s, since_s)) for end_s in ends_s]
        return Growth(amounts, [covered if hit else 0.0 for covered, hit in zip(covered_s, touched, strict=True)])

    def level(self, *key: str) -> Curve:
        """Return the mean of a gauge; () if it is never known."""
        axis, slot = self._axis, self._gauges.get(key)
        if axis is None or slot is None:
            return ()
        sums, weights = [0.0] * axis.num_intervals, [0.0] * axis.num_intervals
        for parts, frame in zip(self._within, self._frames, strict=True):
            value = frame.means[slot] if slot < len(frame.means) else math.nan
            if value == value:
                for index, share in parts:
                    weight = share * frame.looks
                    sums[index] += value * weight
                    weights[index] += weight
        return _known(tuple(sum_ / weight if weight > 0 else None for sum_, weight in zip(sums, weights, strict=True)))

    def highest(self, *key: str) -> float | None:
        """Return the maximum of a memory gauge over all samples: a mean hides short peaks. None: never known, or not
        requested."""
        return self._highest.get(key)

    def counter(self, *key: str) -> Curve:
        """Return the value of a counter at the end of each interval; () if it is never known."""
        axis, slot = self._axis, self._counters.get(key)
        if axis is None or slot is None:
            return ()
        values: list[float | None] = [None] * axis.num_intervals
        for parts, frame in zip(self._within, self._frames, strict=True):
            value = frame.counters[slot] if slot < len(frame.counters) else math.nan
            if value == value and parts:
                values[parts[-1][0]] = value
        known = [index for index, value in enumerate(values) if value is not None]
        for index in range(known[0] + 1, known[-1]) if known else ():  # an interval in which no row ends
            values[index] = values[index - 1] if values[index] is None else values[index]
        return _known(tuple(values))


def ratio(above: Growth | None, below: Growth | None) -> Curve:
    """Return one growth divided by another; None where the second is 0."""
    if above is None or below is None:
        return ()
    return _known(tuple(up / down if down > 0 else None for up, down in zip(above.amounts, below.amounts, strict=True)))


def total(growths: Sequence[Growth | None]) -> Growth | None:
    """Return the sum of several growths; its coverage is the largest of theirs."""
    known = [growth for growth in growths if growth is not None]
    if not known:
        return None
    return Growth(
        [sum(values) for values in zip(*(growth.amounts for growth in known), strict=True)],
        [max(values) for values in zip(*(growth.covered_s for growth in known), strict=True)],
    )


def _known(curve: Curve) -> Curve:
    return curve if any(value is not None for value in curve) else ()
