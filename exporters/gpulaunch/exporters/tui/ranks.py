"""The page of ranks: filter, sort order, marks of anomalies, and the table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpulaunch.exporters.tui.cells import Line, clip, figure, fit, line, ratio, seconds, size, spark, took
from gpulaunch.exporters.tui.look import Body, Drawn, Look
from gpulaunch.exporters.tui.phases import shares_bar
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.findings import nobody_watched
from gpulaunch.exporters.view.model import RankView, RunView, Status

STRAGGLER: Final = "straggler"
"""The rule that identifies a rank the others wait for."""
_STILL_S: Final = 10.0
"""A rank is marked after this long without a step, if that is also this many of its steps."""
_STILL_STEPS: Final = 5.0
_CROWD: Final = 17
"""From this many ranks on, one curve shows all of them side by side."""
_TERM: Final = re.compile(r"(?:n(?P<node>\d{1,7})|(?P<first>\d{1,7})(?:-(?P<last>\d{1,7}))?|(?P<mark>!))\Z")


class FilterError(ValueError):
    """The typed filter is invalid; the message is one line for the user."""


def own_seconds(rank: RankView) -> float | None:
    """Return its step time without waiting for other ranks: a rank that is slow here slows down all."""
    if rank.step_seconds_now is None or not rank.phase_ratios_now:
        return None
    return rank.step_seconds_now * (1.0 - rank.phase_ratios_now.get("comm", 0.0))


def _memory(rank: RankView) -> float | None:
    return float(sum(rank.memory.rss_bytes.values())) if rank.memory.rss_bytes else None


def _gpu_memory(rank: RankView) -> float | None:
    known = rank.memory.gpu_bytes.get("allocated")
    return None if known is None else float(known)


SORTS: Final[Mapping[str, Callable[[RankView], float | None]]] = {
    "rank": lambda rank: float(rank.rank),
    "own step time": own_seconds,
    "step time": lambda rank: rank.step_seconds_now,
    "data wait": lambda rank: rank.phase_ratios_now.get("data_wait") if rank.phase_ratios_now else None,
    "memory": _memory,
    "gpu memory": _gpu_memory,
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


def chosen(view: RunView, look: Look) -> list[RankView]:
    """Return the ranks that match the filter, in the requested order. An invalid filter matches all."""
    try:
        passes = filter_of(look.only)
    except FilterError:
        passes = filter_of("")
    marks = marks_of(view)
    ranks = [rank for rank in view.ranks if passes(rank, rank.rank in marks)]
    key = SORTS.get(look.sort, SORTS["rank"])
    known = [rank for rank in ranks if key(rank) is not None]
    unknown = [rank for rank in ranks if key(rank) is None]
    downwards = (look.sort != "rank" and look.sort in SORTS) != look.reverse
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


def selected(view: RunView, look: Look) -> RankView | None:
    """Return the selected rank or, if it is not visible, the first visible one."""
    ranks = chosen(view, look)
    return next((rank for rank in ranks if rank.rank == look.rank), ranks[0] if ranks else None)


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


# -- the table


def ranks_page(view: RunView, look: Look, width: int) -> Body:
    """Return the page of ranks by phase, the selected one marked with `>`."""
    ranks = chosen(view, look)
    here = selected(view, look)
    head: list[Line] = []
    many_nodes = len({rank.node for rank in view.ranks}) > 1
    if len(view.ranks) >= _CROWD:
        head.append(_crowd(ranks, look, width))
    columns = _columns(width, nodes=many_nodes)
    head.append(_title(columns, width))
    marks = marks_of(view)
    if here is None:
        told = "no rank passes the filter" if view.ranks else _nobody(view)
        return Body(head=tuple(head), rows=(line((told, "dim")),))

    def draw(at: int) -> Line:
        rank = ranks[at]
        return _row(rank, look, columns, width, mark=marks.get(rank.rank, ""), here=rank is here and look.cursor)

    return Body(head=tuple(head), rows=Drawn(len(ranks), draw), focus=ranks.index(here))


def _nobody(view: RunView) -> str:
    return "no rank has been seen" + ("" if view.watched else f": {nobody_watched(profiled=view.profiled)}")


def _crowd(ranks: Sequence[RankView], look: Look, width: int) -> Line:
    """Return a curve of all ranks side by side: the step time of each without waiting for the others."""
    name = f"{len(ranks)} ranks, own step time "
    known = [(value, rank.rank) for rank in ranks if (value := own_seconds(rank)) is not None]
    most = f" most {seconds(max(known)[0])} rank {max(known)[1]}" if known else f" {UNKNOWN}"
    room = max(0, min(len(ranks), width - len(name) - len(most)))
    columns: list[float | None] = []
    for at in range(room):  # the slowest of those sharing a column: one in 256 must not vanish in a mean
        part = ranks[at * len(ranks) // room : (at + 1) * len(ranks) // room]
        columns.append(max((value for rank in part if (value := own_seconds(rank)) is not None), default=None))
    return line((name, "dim"), (spark(tuple(columns), room, ascii_only=look.ascii_only), ""), (most, ""))


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """The columns that fit."""

    bar: int
    trend: int
    nodes: bool
    memory: bool
    copies: bool


def _columns(width: int, *, nodes: bool) -> _Columns:
    memory, copies = width >= _MIDDLING, width >= _WIDE
    rest = max(0, width - 30 - (5 if nodes else 0) - (14 if memory else 0) - (6 if copies else 0) - _MARK_CELLS)
    trend = min(20, rest // 3) if rest >= 36 else 0
    return _Columns(
        bar=max(8, rest - trend - (1 if trend else 0)), trend=trend, nodes=nodes, memory=memory, copies=copies
    )


_MIDDLING: Final = 64
_WIDE: Final = 96
_MARK_CELLS: Final = 13


def _title(columns: _Columns, width: int) -> Line:
    told = f"{'RANK':>6}{' NODE' if columns.nodes else ''} STEPS/S    STEP DATA {fit('PHASES', columns.bar)} "
    told += fit("STEPS/S", columns.trend) + " " if columns.trend else ""
    told += f"{'MEMORY    GPU ' if columns.memory else ''}{'H2D/S ' if columns.copies else ''}MARK"
    return clip(line((told, "title")), width)


def _row(rank: RankView, look: Look, columns: _Columns, width: int, *, mark: str, here: bool) -> Line:
    style = "selected" if here else ""
    now = rank.phase_ratios_now
    node = f"{'n' + str(rank.node):>5}" if columns.nodes else ""
    data = ratio(now.get("data_wait", 0.0)) if now else UNKNOWN
    spans: list[tuple[str, str]] = [
        (f"{'>' if here else ' '}{rank.rank:>5}{node}", style),
        (f" {figure(rank.steps_per_second_now):>7} {seconds(rank.step_seconds_now):>7} {data:>4} ", style),
    ]
    none = "not measured" if rank.steps is None else "no steps lately" if rank.steps else "no steps"
    spans += shares_bar(now, columns.bar) if now else ((fit(none, columns.bar), "dim"),)
    if columns.trend:
        spans += [(" ", ""), (spark(rank.steps_per_second, columns.trend, ascii_only=look.ascii_only), "curve")]
    if columns.memory:
        spans.append((f" {size(_memory(rank)):>6} {size(_gpu_memory(rank)):>6}", style))
    spans.append((" ", style))
    if columns.copies:
        rates = rank.copy_bytes_per_second.get("h2d", ())
        spans.append((f"{size(next((value for value in reversed(rates) if value is not None), None)):>5} ", style))
    spans.append((mark, "bad" if "late" in mark or "still" in mark else "dim"))
    return clip(tuple(spans), width)


def steps_of(rank: RankView) -> str:
    """Return the number of steps of a rank, by kind."""
    told = f"{count(rank.steps)} steps"
    if (rank.microsteps or 0) > (rank.steps or 0):
        told += f" ({count(rank.microsteps)} microsteps)"
    return told + (f", {count(rank.skipped_steps)} skipped" if rank.skipped_steps else "")
