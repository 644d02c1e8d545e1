"""Charts of a quantity by rank: a line for each of few ranks, of many the range."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gpulaunch.exporters.report.document import Chart, Series
from gpulaunch.exporters.report.time_axis import over_time
from gpulaunch.exporters.view.model import RunView
from gpulaunch.exporters.view.rank_model import Curve, RankView

FEW: Final = 8
"""Up to this many ranks have a line each."""


@dataclass(frozen=True)
class RankCurves:
    """Makes the charts by rank of one run."""

    view: RunView
    every_rank: bool = False
    """Whether each of many ranks has its line, too, drawn on request."""

    def chart(
        self,
        name: str,
        title: str,
        unit: str,
        curve_of: Callable[[RankView], Curve],
        told: Callable[[float | None], str],
        *,
        summary: str = "",
        factor: float = 1.0,
    ) -> tuple[Chart, ...]:
        """Return the chart; () if no rank has such a curve.

        Args:
            name: id of the chart.
            title: of the chart.
            unit: of its axis.
            curve_of: returns a rank's curve.
            told: writes one of its values.
            summary: what the chart shows, in a sentence; "": the last values.
            factor: from the curve's unit to the axis's.
        """
        curves = {rank.rank: curve_of(rank) for rank in self.view.ranks}
        curves = {rank: curve for rank, curve in curves.items() if any(value is not None for value in curve)}
        if not curves:
            return ()
        summary = summary or _last_values(curves, told)
        return over_time(self.view, name, title, unit, summary, self._series(curves), factor=factor)

    def _series(self, curves: Mapping[int, Curve]) -> list[Series]:
        if len(curves) <= FEW:
            return [Series(name=f"rank {rank}", values=curve, colour=rank) for rank, curve in curves.items()]
        known = [[value for value in moment if value is not None] for moment in zip(*curves.values(), strict=True)]
        middle = tuple(statistics.median_low(values) if values else None for values in known)
        series = [
            Series(name="lowest rank", values=tuple(min(values, default=None) for values in known), colour=1),
            Series(name="median", values=middle, colour=0),
            Series(name="highest rank", values=tuple(max(values, default=None) for values in known), colour=2),
        ]
        if self.every_rank:
            series += [
                Series(name=f"rank {rank}", values=curve, colour=3, on_request=True) for rank, curve in curves.items()
            ]
        return series


def _last_values(curves: Mapping[int, Curve], told: Callable[[float | None], str]) -> str:
    """Say how the curves end; of many, which ranks are the lowest and the highest."""
    last = {rank: next(value for value in reversed(curve) if value is not None) for rank, curve in curves.items()}
    if len(last) <= FEW:
        return f"Last values: {', '.join(f'rank {rank} {told(value)}' for rank, value in last.items())}."
    low, high = min(last, key=lambda rank: (last[rank], rank)), max(last, key=lambda rank: (last[rank], -rank))
    middle = told(statistics.median_low(last.values()))
    return (
        f"Last values: lowest rank {told(last[low])} (rank {low}), median {middle}, "
        f"highest rank {told(last[high])} (rank {high})."
    )
