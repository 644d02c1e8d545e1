"""Resamples the curves of two runs to intervals of a common length, for a comparison. Pure.

Each view has its own interval length. A mean over a minute includes what a mean over a second mostly misses, such as
checkpoints; and if steps are longer than an interval, one or none ends in it, by chance. So the values of both runs are
over stretches of equal length, no shorter than the intervals, and than several steps, of either.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from gpulaunch.exporters.view.model import RunView
from gpulaunch.exporters.view.rank_model import Curve

SEVERAL: Final = 3
"""Minimum number of steps in a stretch."""
_WARM_UP: Final = 0.1
"""Share of intervals skipped at the beginning; so are the first and the last one, which are incomplete."""
_ALIKE: Final = 0.05
"""Stretches whose lengths differ by no more are treated as equal."""


def length_between(a: RunView, b: RunView) -> float:
    """Return the stretch length for two runs, in seconds."""
    steps = [[step for step in view.step_mean_seconds if step is not None] for view in (a, b)]
    longest = max((median(known) for known in steps if known), default=0.0)
    return max(a.interval_seconds, b.interval_seconds, SEVERAL * longest)


def with_whole_steps(view: RunView) -> RunView:
    """Return the view with each step spread over its duration, not counted at its end; rates are rank means."""
    means, interval_s = view.step_mean_seconds, view.interval_seconds
    if not means:
        return view
    of_ranks = [rank.steps_per_second for rank in view.ranks if rank.steps_per_second] or [view.steps_per_second]
    known = ([rate for rate in each if rate is not None] for each in zip(*of_ranks, strict=True))
    rates = [sum(each) / len(each) if each else 0.0 for each in known]
    took_s = [0.0 if mean is None else rate * interval_s * mean for mean, rate in zip(means, rates, strict=True)]
    parts = _parts(took_s, interval_s)

    def mean_of(curve: Curve, *, by_steps: bool = False) -> Curve:
        """Return the mean over the steps in progress in each interval; None if there are none."""
        weighted = (
            [
                (value, seconds / (means[end] or 1.0) if by_steps else seconds)
                for end, seconds in each
                if (value := curve[end]) is not None
            ]
            for each in parts
        )
        return tuple(_mean(each) if each else None for each in weighted) if curve else ()

    def shared(curve: Sequence[float | None]) -> Curve:
        return tuple(
            sum((curve[end] or 0.0) * seconds / took_s[end] for end, seconds in each) if each else None
            for each in parts
        )

    return replace(
        view,
        step_mean_seconds=mean_of(means, by_steps=True),
        phase_ratios={phase: mean_of(curve) for phase, curve in view.phase_ratios.items()},
        steps_per_second=shared(rates),
        samples_per_second=shared(view.samples_per_second) if view.samples_per_second else (),
    )


def steady(curve: Curve, view: RunView, length_s: float, *, by_steps: bool) -> list[float]:
    """Return the steady-state values of a curve, one per stretch.

    Args:
        curve: a curve of the view.
        view: from `with_whole_steps`.
        length_s: length of a stretch.
        by_steps: weight by steps (a mean over steps), not by time (a rate).
    """
    if not curve or not view.step_mean_seconds:
        return []
    weights = view.steps_per_second if by_steps else (1.0,) * len(curve)
    known = [
        (value, weight)
        for value, weight, step in zip(curve, weights, view.step_mean_seconds, strict=True)
        if value is not None and weight and step is not None
    ]
    known = known[max(1, round(_WARM_UP * len(known))) : -1]
    if not known:
        return []
    size = length_s / view.interval_seconds
    size = round(size) if abs(size / round(size) - 1) <= _ALIKE else size
    # A remainder is dropped at the beginning. A run shorter than a stretch is one stretch.
    number = max(1, int(len(known) / size))
    begins = [len(known) - size * back for back in range(number, 0, -1)]
    return [_mean(_cut(known, max(0.0, begin), begin + size)) for begin in begins]


def _cut(known: Sequence[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """Return the part from `begin` to `end`, in intervals; those at its ends partially."""
    indices = range(int(begin), min(len(known), math.ceil(end)))
    return [
        (value, weight * (min(end, index + 1) - max(begin, index)))
        for index, (value, weight) in zip(indices, known[indices.start : indices.stop], strict=True)
    ]


def _parts(took_s: Sequence[float], interval_s: float) -> list[list[tuple[int, float]]]:
    """Return per interval which steps ran in it: the interval in which they ended, and their seconds in this one. Takes
    the step time that ended in each interval, and assumes that each step began when the previous one ended."""
    parts: list[list[tuple[int, float]]] = []
    ahead: deque[tuple[int, float]] = deque()
    for index in reversed(range(len(took_s))):
        if took_s[index] > 0:
            ahead.append((index, took_s[index]))
        parts.append([])
        free_s = interval_s
        while ahead and free_s > 0:
            end, left_s = ahead.popleft()
            if left_s > free_s:
                ahead.appendleft((end, left_s - free_s))
            parts[-1].append((end, min(left_s, free_s)))
            free_s -= min(left_s, free_s)
    return parts[::-1]


def _mean(weighted: Sequence[tuple[float, float]]) -> float:
    first = weighted[0][0]  # exact for equal values, to the last digit
    return first + sum((value - first) * weight for value, weight in weighted) / sum(weight for _, weight in weighted)
