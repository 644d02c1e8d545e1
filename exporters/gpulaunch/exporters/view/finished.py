"""Replaces the `now` values of a finished run by means over the whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpulaunch.exporters.view.model import RunView, Status
from gpulaunch.exporters.view.rank_model import RankView


def settled(view: RunView) -> RunView:
    """Return the view to display: unchanged for a running run, with means for a finished one.

    They match the launcher's final summary: relative to the time in steps, not to the time of the run.
    """
    if view.status is Status.RUNNING or not any(_length_s(rank) for rank in view.ranks):
        return view
    ranks = tuple(_settled(rank) for rank in view.ranks)
    lengths_s = [length_s for rank in ranks if (length_s := _length_s(rank)) is not None]
    samples = [rank.samples / rank.step_seconds for rank in ranks if rank.samples and rank.step_seconds]
    return replace(
        view,
        ranks=ranks,
        steps_per_second_now=1 / max(lengths_s),
        samples_per_second_now=sum(samples) if samples else None,
        step_seconds_now=sum(lengths_s) / len(lengths_s),
        phase_ratios_now=_shares(ranks) or view.phase_ratios_now,
    )


def _settled(rank: RankView) -> RankView:
    length_s = _length_s(rank)
    return replace(
        rank,
        steps_per_second_now=None if length_s is None else 1 / length_s,
        step_seconds_now=length_s,
        phase_ratios_now=_shares([rank]) or rank.phase_ratios_now,
        cores_now={},
    )


def _length_s(rank: RankView) -> float | None:
    steps = rank.steps if rank.timed_steps is None else rank.timed_steps
    return rank.step_seconds / steps if steps and rank.step_seconds else None


def _shares(ranks: Sequence[RankView]) -> Mapping[str, float]:
    spent: dict[str, float] = {}
    for rank in ranks:
        for phase, seconds in rank.phase_seconds.items():
            spent[phase] = spent.get(phase, 0.0) + seconds
    total = sum(spent.values())
    return {phase: seconds / total for phase, seconds in spent.items()} if total > 0 else {}
