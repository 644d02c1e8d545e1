"""The curves of a whole run, over its ranks: their axis, which ranks have curves of their own, the sums. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gpulaunch.exporters.view.curves import Axis, Curves, Growth, axis_of, ratio, total
from gpulaunch.exporters.view.goodput import goodput_curve
from gpulaunch.exporters.view.model import RunView
from gpulaunch.exporters.view.rank_model import Curve, RankView
from gpulaunch.exporters.view.ranks import phase_curves, phase_growths
from gpulaunch.exporters.view.source import NodeSource, part

_MOST_RANKS_WITH_CURVES: Final = 128
_NUMBERS: Final = 150_000
"""Approximate limit of values in all rank curves together: large jobs get coarser axes."""
_CURVES_OF_A_RANK: Final = 20
_FEWEST_POINTS: Final = 30


def run_axis(
    sources: Sequence[NodeSource], num_ranks: int, max_points: int, window_s: float | None, began_s: float | None
) -> Axis | None:
    """Return the axis of the newest run; earlier runs in the directory are not in its curves."""
    spans = [source.span for source in sources if source.span is not None]
    if not spans:
        return None
    begin_s, end_s = min(span[0] for span in spans), max(span[1] for span in spans)
    if began_s is not None:
        begin_s = max(begin_s, min(began_s, end_s))
    if window_s is not None:
        begin_s = max(begin_s, end_s - max(2.0, window_s))
    points = max(_FEWEST_POINTS, _NUMBERS // (_CURVES_OF_A_RANK * max(1, min(num_ranks, _MOST_RANKS_WITH_CURVES))))
    return axis_of(begin_s, end_s, max(1, min(max_points, points)))


def ranks_with_curves(sources: Sequence[NodeSource], num_ranks: int) -> set[int] | None:
    """Return the ranks that have curves: with very many, every n-th; None: all."""
    if num_ranks <= _MOST_RANKS_WITH_CURVES:
        return None
    every = sorted({int(label) for source in sources for label in part(source.document, "ranks") if label.isdecimal()})
    step = len(every) / _MOST_RANKS_WITH_CURVES
    return {every[int(index * step)] for index in range(_MOST_RANKS_WITH_CURVES)} if every else set()


def with_curves(
    view: RunView, axis: Axis, sources: Sequence[NodeSource], curves: Sequence[Curves], chosen: set[int] | None
) -> RunView:
    """Add the curves of the whole run; `chosen`: the ranks that have curves, None: all."""
    growths = _growths(sources, curves, chosen, view.ranks)
    samples, steps = total(growths.samples), growths.steps
    knows_goodput = view.goodput_seconds.get("productive") is not None
    return replace(
        view,
        times_s=axis.times_s,
        interval_seconds=axis.interval_s,
        steps_per_second=_slowest([growth.per_second() for growth in steps]),
        samples_per_second=() if samples is None else samples.per_second(),
        step_mean_seconds=ratio(total(growths.times), total(steps)),
        phase_ratios=phase_curves(growths.phases),
        goodput_ratio_over_time=goodput_curve(curves[0], axis.times_s, view.began_s) if knows_goodput else (),
    )


@dataclass(frozen=True)
class _Growths:
    """Per known rank, of the chosen ones with very many; samples of all ranks whose batches were seen."""

    steps: list[Growth] = field(default_factory=list[Growth])
    samples: list[Growth | None] = field(default_factory=list[Growth | None])
    times: list[Growth | None] = field(default_factory=list[Growth | None])
    phases: list[dict[str, Growth | None]] = field(default_factory=list[dict[str, Growth | None]])


def _growths(
    sources: Sequence[NodeSource], curves: Sequence[Curves], chosen: set[int] | None, ranks: Sequence[RankView]
) -> _Growths:
    seen = {str(rank.rank) for rank in ranks if rank.steps is not None}
    with_samples = {str(rank.rank) for rank in ranks if rank.samples}
    found = _Growths()
    for source, own in zip(sources, curves, strict=True):
        for label in (label for label in part(source.document, "ranks") if label in seen):
            if label in with_samples:
                found.samples.append(own.growth_from_0("gpulaunch_samples_total", label))
            if chosen is not None and not (label.isdecimal() and int(label) in chosen):
                continue
            growth = own.growth_from_0("gpulaunch_steps_total", label)
            if growth is not None:
                found.steps.append(growth)
            found.times.append(own.growth_from_0("gpulaunch_step_duration_seconds_sum", label))
            found.phases.append(phase_growths(own, label))
    return found


def _slowest(curves: Sequence[Curve]) -> Curve:
    known = [curve for curve in curves if curve]
    return tuple(
        min((value for value in values if value is not None), default=None) for values in zip(*known, strict=True)
    )
