"""Which line holds most of the fetches of a dataloader, by samples of the stacks of its workers, or of the training
thread where that fetches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gpulaunch.profiler.analysis.facts import world_size
from gpulaunch.profiler.analysis.finding import NOWHERE, Loss, Place, place_of
from gpulaunch.profiler.analysis.nested_lines import innermost_line
from gpulaunch.profiler.analysis.thresholds import HOLDS_FETCHES, SAMPLES_OF_A_LINE
from gpulaunch.profiler.analysis.window import RankWindow, Window
from gpulaunch.profiler.record.line_calls import CONVERTS_LISTS, OTHER_PARTS, OTHER_RANKS, OTHER_WORKERS

_DROPPED: Final = frozenset({OTHER_RANKS, OTHER_WORKERS, OTHER_PARTS})


def converts_lists(rank: RankWindow) -> float:
    """The share of a rank's fetches in what converts lists of numbers; 0 if that is too small, or not known."""
    count = sum(count for line, count in rank.fetching.items() if rank.calls.get(line) == CONVERTS_LISTS)
    return count / rank.fetches if _holds_most(count, rank.fetches) else 0.0


def dropped_share(rank: RankWindow, window: Window) -> tuple[float, Place]:
    """The share of a rank's fetches in what prepares samples that another rank or worker keeps, and where that is; 0 if
    the lines of which some are dropped do not hold most of the fetches."""
    workers = rank.loader.workers_configured if rank.loader is not None else 0
    ranks = world_size(rank, window)
    parts = {OTHER_RANKS: ranks, OTHER_WORKERS: max(1, workers), OTHER_PARTS: ranks * max(1, workers)}
    lines = {line: count for line, count in rank.fetching.items() if rank.calls.get(line) in parts}
    if not lines or not _holds_most(sum(lines.values()), rank.fetches):
        return 0.0, NOWHERE
    dropped = sum(count * (1.0 - 1.0 / parts[rank.calls[line]]) for line, count in lines.items())
    return dropped / rank.fetches, place_of(max(lines, key=lines.__getitem__))


def slow_line(ranks: Sequence[RankWindow]) -> tuple[Place | None, dict[str, float | str]]:
    """The line of the dataset or of what collates that holds most of the sampled fetches of all ranks, if one does: of
    those that call each other the innermost that holds nearly as much."""
    fetching = Counter[str]()
    for rank in ranks:
        fetching.update(rank.fetching)
    if not fetching:
        return None, {}
    fetches = sum(rank.fetches for rank in ranks)
    line = innermost_line(fetching, fetches)
    count = fetching[line]
    if not _holds_most(count, fetches):
        return None, {}
    call = next((rank.calls[line] for rank in ranks if rank.calls.get(line)), "")
    return place_of(line), {"line_ratio": count / fetches, **({"call": call} if call and call not in _DROPPED else {})}


def at_slow_line(loss: Loss, ranks: Sequence[RankWindow]) -> Loss:
    """The same at the line that holds most of the fetches of some ranks, if one does."""
    line, evidence = slow_line(ranks)
    return replace(loss, place=line or loss.place, evidence={**loss.evidence, **evidence})


def _holds_most(count: int, fetches: int) -> bool:
    """Whether so many samples of so many fetches are enough to name what they are in."""
    return max(SAMPLES_OF_A_LINE.value, HOLDS_FETCHES.value * fetches) <= count <= fetches
