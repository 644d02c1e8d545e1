"""Common parts of a view's curves: a readable time axis, slices of it, and which ranks to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gpulaunch.exporters.report.document import Chart, Series
from gpulaunch.exporters.report.formatting import seconds
from gpulaunch.exporters.view.model import RunView
from gpulaunch.exporters.view.rank_model import Curve, RankView

_SLICES = 12
_UNITS = (("h", 3600.0, 7200.0), ("min", 60.0, 300.0))


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Time since the run began or, if its directory has earlier runs, since the first known one began."""

    times: tuple[float, ...]
    """Ends of the intervals, in `unit`."""
    unit: str
    zero_s: float
    seconds_per_unit: float

    def of(self, at_s: float) -> float:
        """Convert a Unix time."""
        return (at_s - self.zero_s) / self.seconds_per_unit


def clock_of(view: RunView) -> Clock:
    """Return a clock with a unit for the run's length."""
    moments = [*view.times_s, *(attempt.ended_s for attempt in view.attempts if attempt.ended_s is not None)]
    begins = [*(time_s - view.interval_seconds for time_s in view.times_s[:1])]
    begins += [attempt.began_s for attempt in view.attempts if attempt.began_s is not None]
    begins += [event.at_s for event in view.events[:1]]
    begins += [view.began_s] if view.began_s is not None else []
    zero_s = min(begins, default=0.0)
    span_s = max(moments, default=zero_s) - zero_s
    unit, length_s = next(((unit, length) for unit, length, least in _UNITS if span_s >= least), ("s", 1.0))
    return Clock(
        times=tuple((time_s - zero_s) / length_s for time_s in view.times_s),
        unit=unit,
        zero_s=zero_s,
        seconds_per_unit=length_s,
    )


def over_time(
    view: RunView, name: str, title: str, unit: str, summary: str, series: Sequence[Series], *, factor: float = 1.0
) -> tuple[Chart, ...]:
    """Return a chart of lines over the run; () if there is none.

    Args:
        view: the run.
        name: id of the chart.
        title: of the chart.
        unit: of its axis.
        summary: what it shows, in a sentence.
        series: the lines; their values are curves of the run.
        factor: from the curves' unit to the axis's.
    """
    if not series:
        return ()
    clock = clock_of(view)
    scaled = [
        replace(each, values=tuple(None if value is None else factor * value for value in each.values))
        for each in series
    ]
    return (
        Chart(
            id=name,
            title=title,
            kind="lines",
            unit=unit,
            summary=summary,
            times=clock.times,
            time_unit=clock.unit,
            series=tuple(scaled),
        ),
    )


def slices(view: RunView, most: int = _SLICES) -> list[tuple[str, slice]]:
    """Divide the axis into a few slices that fit a table: the name and position of each."""
    count = len(view.times_s)
    zero_s = clock_of(view).zero_s
    parts = min(most, count)
    bounds = [count * part // parts for part in range(parts + 1)] if parts else []
    stretches: list[tuple[str, slice]] = []
    for begin, end in pairwise(bounds):
        from_s = view.times_s[begin] - view.interval_seconds - zero_s
        stretches.append(
            (f"{seconds(max(0.0, from_s))} to {seconds(view.times_s[end - 1] - zero_s)}", slice(begin, end))
        )
    return stretches


def throughput(curve: Curve) -> float | None:
    """Return the mean of a rate over a whole slice: unknown values count as 0."""
    known = [value for value in curve if value is not None]
    return sum(known) / len(curve) if known else None


def mean(curve: Curve, weights: Curve = ()) -> float | None:
    """Return the mean of the known values; None if there are none. `weights`: a mean over steps must count steps."""
    by = weights or (1.0,) * len(curve)
    known = [(value, weight) for value, weight in zip(curve, by, strict=True) if value is not None and weight]
    whole = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / whole if whole > 0 else None


def known_range(curve: Curve) -> tuple[float, float] | None:
    """Return the minimum and maximum of a curve."""
    known = [value for value in curve if value is not None]
    return (min(known), max(known)) if known else None


def chosen(ranks: Sequence[RankView], most: int) -> list[RankView]:
    """Return at most this many ranks: those with the longest steps, and the one with the shortest; in order."""
    if len(ranks) <= most:
        return list(ranks)
    by_length = sorted(ranks, key=lambda rank: (-(step_length(rank) or 0.0), rank.rank))
    return sorted([*by_length[: most - 1], by_length[-1]], key=lambda rank: rank.rank)


def step_length(rank: RankView) -> float | None:
    """Return the mean length of a rank's timed steps, in seconds; None if there are none."""
    steps = rank.steps if rank.timed_steps is None else rank.timed_steps
    return rank.step_seconds / steps if steps and rank.step_seconds else None
