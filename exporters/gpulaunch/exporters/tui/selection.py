"""Which ranks a table shows, in which order, which one is selected, and which have an anomaly."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpulaunch.exporters.tui.text import plain, took
from gpulaunch.exporters.view.model import RunView, Status
from gpulaunch.exporters.view.rank_model import RankView

STRAGGLER: Final = "straggler"
"""The rule that identifies a rank the others wait for."""
_STILL_S: Final = 10.0
"""A rank is marked after this long without a step, if that is also this many of its steps."""
_STILL_STEPS: Final = 5.0
_TERM: Final = re.compile(r"(?:n(?P<node>\d{1,7})|(?P<first>\d{1,7})(?:-(?P<last>\d{1,7}))?|(?P<mark>!))\Z")


class FilterError(ValueError):
    """The typed filter is invalid; the message is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the user has chosen."""

    rank: int | None = None
    """None: the first."""
    sort: str = "rank"
    """One of `SORTS`."""
    reverse: bool = False
    only: str = ""
    """Filter of ranks, as typed."""

    def __str__(self) -> str:
        only = f"only {plain(self.only)}" if self.only else ""
        order = f"by {self.sort}" if self.sort != "rank" or self.reverse else ""
        return ", ".join(filter(None, (order, "reversed" if self.reverse else "", only)))


def own_seconds(rank: RankView) -> float | None:
    """Return its step time without waiting for other ranks: a rank that is slow here slows down all."""
    if rank.step_seconds_now is None or not rank.phase_ratios_now:
        return None
    return rank.step_seconds_now * (1.0 - rank.phase_ratios_now.get("comm", 0.0))


def memory(rank: RankView) -> float | None:
    """Return the resident memory of a rank and its workers."""
    return float(sum(rank.memory.rss_bytes.values())) if rank.memory.rss_bytes else None


def gpu_memory(rank: RankView) -> float | None:
    """Return what torch has allocated on the GPU."""
    known = rank.memory.gpu_bytes.get("allocated")
    return None if known is None else float(known)


SORTS: Final[Mapping[str, Callable[[RankView], float | None]]] = {
    "rank": lambda rank: float(rank.rank),
    "own step time": own_seconds,
    "step time": lambda rank: rank.step_seconds_now,
    "data wait": lambda rank: rank.phase_ratios_now.get("data_wait") if rank.phase_ratios_now else None,
    "memory": memory,
    "gpu memory": gpu_memory,
}
"""Sort criteria by name; all but the number sort largest first."""


def marks_of(view: RunView) -> dict[int, str]:
    """Return the marks of ranks with an anomaly: `late`: the others wait for it; `still`: it makes no steps; `off`: it
    is not measured."""
    marks: dict[int, list[str]] = {}
    for finding in view.findings:
        if finding.rule == STRAGGLER and finding.active:
            marks |= {number: ["late"] for number in finding.ranks}
    for rank in view.ranks:
        still_s = still_seconds(view, rank)
        if still_s is not None:
            marks.setdefault(rank.rank, []).append(f"still {took(still_s)}")
        if rank.steps is None or (not rank.armed and view.status is Status.RUNNING):
            marks.setdefault(rank.rank, []).append("off")
    return {number: ", ".join(told) for number, told in marks.items()}


def still_seconds(view: RunView, rank: RankView) -> float | None:
    """Return how long a rank of a running run has made no step; None if that is normal."""
    if view.status is not Status.RUNNING or view.seen_s is None or rank.last_step_s is None:
        return None
    usual = (rank.step_seconds or 0.0) / rank.steps if rank.steps else 0.0
    since_s = view.seen_s - rank.last_step_s
    return since_s if since_s > max(_STILL_S, _STILL_STEPS * usual) else None


def chosen(view: RunView, selection: Selection) -> list[RankView]:
    """Return the ranks that match the filter, in the requested order. An invalid filter matches all."""
    try:
        passes = filter_of(selection.only)
    except FilterError:
        passes = filter_of("")
    marks = marks_of(view)
    ranks = [rank for rank in view.ranks if passes(rank, rank.rank in marks)]
    key = SORTS.get(selection.sort, SORTS["rank"])
    known = [rank for rank in ranks if key(rank) is not None]
    unknown = [rank for rank in ranks if key(rank) is None]
    downwards = (selection.sort != "rank" and selection.sort in SORTS) != selection.reverse
    known.sort(key=lambda rank: (key(rank) or 0.0, -rank.rank if downwards else rank.rank), reverse=downwards)
    return known + unknown


def filter_of(text: str) -> Callable[[RankView, bool], bool]:
    """Read a filter: ranks `3`, `8-15`, those of a node `n1`, those with a mark `!`; several are combined by OR.

    Raises:
        FilterError: the text is not a filter.
    """
    numbers: list[tuple[int, int]] = []
    nodes: set[int] = set()
    marked = False
    terms = text.replace(",", " ").split()
    for term in terms:
        found = _TERM.match(term)
        if not found:
            raise FilterError(f"no filter: {term[:40]!r}; ranks are 3 or 8-15, those of a node n1, marked ones !")
        if found["mark"]:
            marked = True
        elif found["node"]:
            nodes.add(int(found["node"]))
        else:
            numbers.append((int(found["first"]), int(found["last"] or found["first"])))

    def passes(rank: RankView, has_mark: bool) -> bool:
        return (
            not terms
            or (marked and has_mark)
            or rank.node in nodes
            or any(first <= rank.rank <= last for first, last in numbers)
        )

    return passes


def selected(view: RunView, selection: Selection) -> RankView | None:
    """Return the selected rank or, if it is not visible, the first visible one."""
    ranks = chosen(view, selection)
    return next((rank for rank in ranks if rank.rank == selection.rank), ranks[0] if ranks else None)


def told_ranks(ranks: Sequence[int], *, most: int = 8) -> str:
    """Return `rank 3`, `ranks 0, 1`, `ranks 0-7, 9`: with consecutive ranks as ranges."""
    if not ranks:
        return "no rank"
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    told = [
        f"{run[0]}-{run[-1]}" if len(run) > 1 and run[-1] > run[0] + 1 else ", ".join(map(str, run)) for run in runs
    ]
    more = f", ... {len(set(ranks))} in all" if len(told) > most else ""
    return f"rank{'' if len(set(ranks)) == 1 else 's'} {', '.join(told[:most])}{more}"
