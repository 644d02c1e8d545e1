"""A run that is over has no `now`: where its last moments are not known, its totals are shown in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpulaunch.exporters.view.model import RankView, RunView, Status

__all__ = ["settled"]


def settled(view: RunView) -> RunView:
    """Give the view as it is to be shown: of a run that goes on as it is, of one that is over without gaps in `now`."""
    if view.status is Status.RUNNING or not any(rank.steps for rank in view.ranks):
        return view
    ranks = tuple(_settled(rank) for rank in view.ranks)
    paces = [rank.steps_per_second_now for rank in ranks if rank.steps_per_second_now is not None]
    lengths = [rank.step_seconds_now for rank in ranks if rank.step_seconds_now is not None]
    return replace(
        view,
        ranks=ranks,
        steps_per_second_now=_or(view.steps_per_second_now, min(paces, default=None)),
        step_seconds_now=_or(view.step_seconds_now, sum(lengths) / len(lengths) if lengths else None),
        phase_ratios_now=view.phase_ratios_now or _shares(view.ranks),
    )


def _settled(rank: RankView) -> RankView:
    if not rank.steps or not rank.step_seconds:
        return rank
    return replace(
        rank,
        steps_per_second_now=_or(rank.steps_per_second_now, rank.steps / rank.step_seconds),
        step_seconds_now=_or(rank.step_seconds_now, rank.step_seconds / rank.steps),
        phase_ratios_now=rank.phase_ratios_now or _shares([rank]),
    )


def _shares(ranks: Sequence[RankView]) -> Mapping[str, float]:
    spent: dict[str, float] = {}
    for rank in ranks:
        for phase, seconds in rank.phase_seconds.items():
            spent[phase] = spent.get(phase, 0.0) + seconds
    total = sum(spent.values())
    return {phase: seconds / total for phase, seconds in spent.items()} if total > 0 else {}


def _or(known: float | None, otherwise: float | None) -> float | None:
    return otherwise if known is None else known
