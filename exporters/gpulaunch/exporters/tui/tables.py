"""The tables with a row per rank. Each is a list of columns: to add one, add it to a list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpulaunch.exporters.tui.charts import Bar, Chart, Line, Spark
from gpulaunch.exporters.tui.selection import gpu_memory, memory
from gpulaunch.exporters.tui.text import figure, number, ratio, seconds, size
from gpulaunch.exporters.view.figures import UNKNOWN
from gpulaunch.exporters.view.model import RunView
from gpulaunch.exporters.view.rank_model import LoaderView, RankView

Cell: TypeAlias = str | Chart


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column."""

    title: str
    """In capitals, as it stands above the column."""
    cell: Callable[[RankView, str], Cell]
    """Formats a rank with its mark ("" for none). A bare text is aligned to the right."""
    width: int
    """In terminal cells, at least that of the title."""
    stretch: int = 0
    """Its part of the width that is left."""
    left: bool = False
    """Whether its title is aligned to the left, as anything but a bare text is."""
    from_width: int = 0
    """It is only shown on a terminal of at least this width."""
    of_many_nodes: bool = False
    """It is only shown for a run on several nodes."""


def _now(rank: RankView) -> Cell:
    if rank.phase_ratios_now:
        return Bar(rank.phase_ratios_now)
    return Line("not measured" if rank.steps is None else "no steps lately" if rank.steps else "no steps", style="dim")


def _data_wait(rank: RankView) -> str:
    now = rank.phase_ratios_now
    return ratio(now.get("data_wait", 0.0)) if now else UNKNOWN


def _mark(mark: str) -> Line:
    return Line(mark, style="bold red" if "late" in mark or "still" in mark else "dim")


def _h2d(rank: RankView) -> float | None:
    curve = rank.copy_bytes_per_second.get("h2d", ())
    return next((value for value in reversed(curve) if value is not None), None)


def _of_loader(told: Callable[[LoaderView], str]) -> Callable[[RankView, str], str]:
    return lambda rank, _: told(rank.loader) if rank.loader else UNKNOWN


def _of_workers(name: str) -> Callable[[RankView, str], str]:
    """Return the format of a part of the time that workers spend in fetches."""

    def told(loader: LoaderView) -> str:
        total = sum(loader.worker_seconds.values())
        return ratio(loader.worker_seconds[name] / total) if total and name in loader.worker_seconds else UNKNOWN

    return _of_loader(told)


def _of_memory(told: Callable[[RankView], float | None]) -> Callable[[RankView, str], str]:
    return lambda rank, _: size(told(rank))


def _pss(rank: RankView) -> int | None:
    pss = rank.memory.pss_bytes
    return sum(pss.values()) if "trainer" in pss else None


RANK: Final = Column(title="RANK", width=5, cell=lambda rank, _: str(rank.rank))
"""The first column of every table."""

STEPS: Final[tuple[Column, ...]] = (
    RANK,
    Column(title="NODE", width=4, cell=lambda rank, _: f"n{rank.node}", of_many_nodes=True),
    Column(title="STEPS/S", width=7, cell=lambda rank, _: figure(rank.steps_per_second_now)),
    Column(title="STEP", width=7, cell=lambda rank, _: seconds(rank.step_seconds_now)),
    Column(title="DATA", width=4, cell=lambda rank, _: _data_wait(rank)),
    Column(title="PHASES", width=8, cell=lambda rank, _: _now(rank), stretch=2, left=True),
    Column(
        title="STEPS/S",
        width=7,
        cell=lambda rank, _: Spark(rank.steps_per_second),
        stretch=1,
        left=True,
        from_width=100,
    ),
    Column(title="MEMORY", width=6, cell=_of_memory(memory), from_width=64),
    Column(title="GPU", width=6, cell=_of_memory(gpu_memory), from_width=64),
    Column(title="H2D/S", width=5, cell=_of_memory(_h2d), from_width=96),
    Column(title="MARK", width=16, cell=lambda _, mark: _mark(mark), left=True),
)
INPUT: Final[tuple[Column, ...]] = (
    RANK,
    Column(title="WAIT/STEP", width=9, cell=lambda rank, _: _data_wait(rank)),
    Column(title="WAITED", width=7, cell=_of_loader(lambda loader: seconds(loader.wait_seconds))),
    Column(title="READY", width=5, cell=_of_loader(lambda it: f"{number(it.ready)}/{number(it.outstanding)}")),
    Column(
        title="WORKERS",
        width=7,
        cell=_of_loader(lambda loader: f"{number(loader.workers_alive)}/{number(loader.workers_configured)}"),
    ),
    Column(title="PREP", width=6, cell=_of_workers("prep")),
    Column(title="CONTEND", width=7, cell=_of_workers("contention")),
    Column(title="BLOCKED", width=7, cell=_of_workers("blocked")),
    Column(title="BATCHES", width=7, cell=_of_loader(lambda loader: figure(loader.batches))),
    Column(title="STORAGE", width=7, cell=_of_loader(lambda loader: size(loader.storage_bytes))),
)
MEMORY: Final[tuple[Column, ...]] = (
    RANK,
    Column(title="TRAINER", width=7, cell=_of_memory(lambda rank: rank.memory.rss_bytes.get("trainer"))),
    Column(title="WORKERS", width=7, cell=_of_memory(lambda rank: rank.memory.rss_bytes.get("workers"))),
    Column(title="PSS", width=5, cell=_of_memory(_pss)),
    Column(title="IN SHM", width=7, cell=_of_memory(lambda rank: rank.memory.shm_inflight_bytes)),
    Column(title="ALLOC", width=7, cell=_of_memory(lambda rank: rank.memory.gpu_bytes.get("allocated"))),
    Column(title="RESERVED", width=8, cell=_of_memory(lambda rank: rank.memory.gpu_bytes.get("reserved"))),
    Column(title="PEAK", width=6, cell=_of_memory(lambda rank: rank.memory.gpu_bytes.get("peak_allocated"))),
    Column(title="PINNED", width=6, cell=_of_memory(lambda rank: rank.memory.pinned_bytes)),
    Column(title="RETRY", width=5, cell=lambda rank, _: number(rank.memory.alloc_retries)),
    Column(title="OOM", width=3, cell=lambda rank, _: number(rank.memory.ooms)),
)


def fitting(columns: Sequence[Column], view: RunView, width: int) -> list[tuple[Column, int]]:
    """Return the columns that are shown on a terminal of this width, each with its own width.

    A cell between two columns is not part of either, and the last one on the screen is left for a scroll bar.
    """
    many_nodes = len({rank.node for rank in view.ranks}) > 1
    shown = [each for each in columns if each.from_width <= width and (many_nodes or not each.of_many_nodes)]
    spare = max(0, width - 1 - sum(each.width + 1 for each in shown))
    parts = sum(each.stretch for each in shown) or 1
    return [(each, each.width + spare * each.stretch // parts) for each in shown]


def title(column: Column, width: int) -> Text:
    """Return what stands above a column of this width."""
    return Text(column.title if column.left else column.title.rjust(width))


def cell(column: Column, width: int, rank: RankView, mark: str) -> RenderableType:
    """Return the content of a cell of this width; a blank follows it."""
    content = column.cell(rank, mark)
    return Text(content.rjust(width), no_wrap=True) if isinstance(content, str) else Padding(content, (0, 1, 0, 0))


def rich_table(
    columns: Sequence[Column], view: RunView, ranks: Sequence[RankView], marks: Mapping[int, str], width: int
) -> Table:
    """Return the whole table."""
    table = Table(box=None, padding=0, header_style="bold underline")
    shown = fitting(columns, view, width)
    for column, cells in shown:
        table.add_column(title(column, cells), width=cells + 1, no_wrap=True)
    for rank in ranks:
        table.add_row(*(cell(column, cells, rank, marks.get(rank.rank, "")) for column, cells in shown))
    return table
