"""What a run did over time, in stretches of one length for both runs of a comparison. Pure.

A view has intervals of its own length. A mean over a minute has what a mean over a second mostly leaves out, such as
checkpoints; and of steps that are longer than an interval one or none ends in it, by chance. So values of two runs are
of stretches that are equally long, no shorter than the intervals of either and than several steps of either.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from gpulaunch.exporters.view.model import Curve, RunView

SEVERAL: Final = 3
"""Steps are in a stretch, at least."""
_WARM_UP: Final = 0.1
"""Of the intervals are left out at the beginning; and the first and the last one, which are not whole."""
_ALIKE: Final = 0.05
"""Stretches that differ by no more are equally long."""


def length_between(a: RunView, b: RunView) -> float:
    """How long the stretches of two runs are, in seconds."""
    steps = [[step for step in view.step_mean_seconds if step is not None] for view in (a, b)]
    longest = max((median(known) for known in steps if known), default=0.0)
    return max(a.interval_seconds, b.interval_seconds, SEVERAL * longest)


def with_whole_steps(view: RunView) -> RunView:
    """The view with each step in the time that it took, and not where it ended; rates are the mean of the ranks."""
    means, interval_s = view.step_mean_seconds, view.interval_seconds
    if not means:
        return view
    of_ranks = [rank.steps_per_second for rank in view.ranks if rank.steps_per_second] or [view.steps_per_second]
    known = ([rate for rate in each if rate is not None] for each in zip(*of_ranks, strict=True))
    rates = [sum(each) / len(each) if each else 0.0 for each in known]
    took_s = [0.0 if mean is None else rate * interval_s * mean for mean, rate in zip(means, rates, strict=True)]
    parts = _parts(took_s, interval_s)

    def mean_of(curve: Curve, *, by_steps: bool = False) -> Curve:
        """Of the steps that were being made in each interval; None where none was."""
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
    """The values of a curve while the ranks were making steps as they do, one of each stretch.

    Args:
        curve: of the view.
        view: with whole steps.
        length_s: how long a stretch is.
        by_steps: whether it is a mean of steps, which counts steps, and no rate, which counts time.
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
    # What is left over is left out at the beginning. A run that is shorter than a stretch is one.
    number = max(1, int(len(known) / size))
    begins = [len(known) - size * back for back in range(number, 0, -1)]
    return [_mean(_cut(known, max(0.0, begin), begin + size)) for begin in begins]


def _cut(known: Sequence[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """What is from `begin` to `end`, in intervals; of those at its ends, a part."""
    indices = range(int(begin), min(len(known), math.ceil(end)))
    return [
        (value, weight * (min(end, index + 1) - max(begin, index)))
        for index, (value, weight) in zip(indices, known[indices.start : indices.stop], strict=True)
    ]


def _parts(took_s: Sequence[float], interval_s: float) -> list[list[tuple[int, float]]]:
    """The steps that ended in an interval took so long: where that time was, if one step began as the one before it
    ended. Of each interval: in which its steps ended, and how many seconds of it were theirs."""
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
    first = weighted[0][0]  # of equal values it is the mean, to the last digit
    return first + sum((value - first) * weight for value, weight in weighted) / sum(weight for _, weight in weighted)
