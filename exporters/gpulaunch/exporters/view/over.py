"""A run that is over has no `now`: what is told of a run that goes on as of its last moments, is told of all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpulaunch.exporters.view.model import RankView, RunView, Status

__all__ = ["settled"]


def settled(view: RunView) -> RunView:
    """Give the view as it is to be shown: of a run that goes on as it is, of one that is over with its means.

    They are those that the launcher tells at its end: by the time in steps, not by that of the run.
    """
    stepped = [rank for rank in view.ranks if rank.steps and rank.step_seconds]
    if view.status is Status.RUNNING or not stepped:
        return view
    ranks = tuple(_settled(rank) for rank in view.ranks)
    paces = [rank.steps_per_second_now for rank in ranks if rank.steps_per_second_now is not None]
    lengths = [rank.step_seconds_now for rank in ranks if rank.step_seconds_now is not None]
    samples = [rank.samples / rank.step_seconds for rank in stepped if rank.samples and rank.step_seconds]
    return replace(
        view,
        ranks=ranks,
        steps_per_second_now=min(paces),
        samples_per_second_now=sum(samples) if samples else None,
        step_seconds_now=sum(lengths) / len(lengths),
        phase_ratios_now=_shares(ranks) or view.phase_ratios_now,
    )


def _settled(rank: RankView) -> RankView:
    if not rank.steps or not rank.step_seconds:
        return rank
    return replace(
        rank,
        steps_per_second_now=rank.steps / rank.step_seconds,
        step_seconds_now=rank.step_seconds / rank.steps,
        phase_ratios_now=_shares([rank]) or rank.phase_ratios_now,
        cores_now={},
    )


def _shares(ranks: Sequence[RankView]) -> Mapping[str, float]:
    spent: dict[str, float] = {}
    for rank in ranks:
        for phase, seconds in rank.phase_seconds.items():
            spent[phase] = spent.get(phase, 0.0) + seconds
    total = sum(spent.values())
    return {phase: seconds / total for phase, seconds in spent.items()} if total > 0 else {}
