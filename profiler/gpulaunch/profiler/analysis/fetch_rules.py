"""Rules about what a fetch of a dataloader computes in vain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpulaunch.profiler.analysis.fetch_lines import converts_lists, dropped_share
from gpulaunch.profiler.analysis.finding import Loss
from gpulaunch.profiler.analysis.loader_model import LoaderModel
from gpulaunch.profiler.analysis.loader_rules import is_unread, supply_loss
from gpulaunch.profiler.analysis.thresholds import LOST
from gpulaunch.profiler.analysis.window import RankWindow, Window


def converted_lists(window: Window) -> Iterator[Loss]:
    """What collates converts lists of numbers, one by one."""
    for rank in window.ranks:
        share = converts_lists(rank)
        advice = (
            "The samples of the dataset have lists of Python numbers, which what collates converts one by one: that is "
            f'{share:.0%} of a fetch. Return NumPy arrays or tensors (torch.from_numpy, dataset.with_format("torch")).'
        )
        yield from _in_vain(rank, window, share, advice=advice, converting_ratio=share)


def dropped_samples(window: Window) -> Iterator[Loss]:
    """A dataset prepares samples of other ranks or workers, too, which it drops then."""
    for rank in window.ranks:
        share, place = dropped_share(rank, window)
        advice = (
            "This line prepares samples before those of other ranks or workers are dropped: that is "
            f"{share:.0%} of a fetch. Drop them first, by their number, or give each its own files."
        )
        for loss in _in_vain(rank, window, share, advice=advice, dropped_ratio=share):
            yield replace(loss, place=place)


def _in_vain(rank: RankWindow, window: Window, share: float, *, advice: str, **evidence: float) -> Iterator[Loss]:
    """A share of a rank's fetches as a loss, if training waits for it."""
    supply = LoaderModel.of(rank, window)
    if supply is None or not share or is_unread(rank, supply):
        return
    fetched_s = supply.step_s - supply.own_s if supply.workers else rank.phase_s("data_wait")
    lost_s = min(share * (supply.step_s if supply.workers else fetched_s), fetched_s)
    if lost_s >= LOST.value * supply.step_s:
        yield supply_loss(rank, supply, supply.step_s - lost_s, advice=advice, **evidence)
