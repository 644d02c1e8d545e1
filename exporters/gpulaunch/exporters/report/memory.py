"""Report section on memory of the ranks, their GPUs and their nodes."""

from __future__ import annotations

from typing import Final

from gpulaunch.exporters.report.anatomy import MOST_ROWS
from gpulaunch.exporters.report.document import Block, Chart, Column, Paragraph, Section, Series, Table
from gpulaunch.exporters.report.formatting import size
from gpulaunch.exporters.report.time_axis import chosen, clock_of, mean, slices
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import Curve, RankView, RunView

_MOST_LINES: Final = 8
_MIB: Final = 1 << 20
_STATES: Final = ("allocated", "reserved")


def section(view: RunView) -> Section:
    """Return the section."""
    ranks = [rank for rank in view.ranks if rank.memory.rss_bytes or rank.memory.gpu_bytes]
    blocks: list[Block] = []
    shown = chosen(ranks, MOST_ROWS)
    if shown:
        blocks.append(_by_rank(shown))
    if any(rank.memory.gpu_bytes for rank in shown):
        blocks.append(_on_gpu(shown))
    blocks += _over_time(view)
    if view.nodes:
        blocks.append(_of_nodes(view))
    return Section(id="memory", title="Memory", blocks=tuple(blocks) or (Paragraph("Nothing is known of memory."),))


def _by_rank(ranks: list[RankView]) -> Table:
    return Table(
        caption="Host memory of each rank when it was seen last (resident counts shared pages in each process)",
        columns=tuple(
            Column(title, number=index > 0)
            for index, title in enumerate(
                ("Rank", "Trainer", "Workers", "Trainer, proportional", "Workers, proportional", "Batches in shm")
            )
        ),
        rows=tuple(
            (
                str(rank.rank),
                size(rank.memory.rss_bytes.get("trainer")),
                size(rank.memory.rss_bytes.get("workers")),
                size(rank.memory.pss_bytes.get("trainer")),
                size(rank.memory.pss_bytes.get("workers")),
                size(rank.memory.shm_inflight_bytes),
            )
            for rank in ranks
        ),
    )


def _on_gpu(ranks: list[RankView]) -> Table:
    titles = ("Rank", "Allocated", "Reserved", "Peak allocated", "Peak reserved", "Pinned host", "Retries", "OOMs")
    return Table(
        caption="GPU memory of each rank, as torch's allocator has it",
        columns=tuple(Column(title, number=index > 0) for index, title in enumerate(titles)),
        rows=tuple(
            (
                str(rank.rank),
                *(size(rank.memory.gpu_bytes.get(state)) for state in _STATES),
                *(size(rank.most_bytes.get(state)) for state in _STATES),
                size(rank.memory.pinned_bytes),
                count(rank.memory.alloc_retries),
                count(rank.memory.ooms),
            )
            for rank in ranks
        ),
    )


def _over_time(view: RunView) -> list[Block]:
    blocks: list[Block] = []
    quantities = (
        ("host-memory", "Resident memory of the trainers", "trainer"),
        ("worker-memory", "Resident memory of the dataloader workers", "workers"),
        ("gpu-memory", "GPU memory allocated", "allocated"),
    )
    clock = clock_of(view)
    for name, title, what in quantities:
        curves = _curves(view, what)
        ranks = chosen([rank for rank in view.ranks if rank.rank in curves], _MOST_LINES)
        if not ranks:
            continue
        blocks.append(
            Chart(
                id=name,
                title=f"{title} over time",
                kind="lines",
                unit="MiB",
                summary=" ".join(_course(rank, curves[rank.rank], what) for rank in ranks[:4]),
                times=clock.times,
                time_unit=clock.unit,
                series=tuple(
                    Series(
                        name=f"rank {rank.rank}",
                        values=tuple(None if value is None else value / _MIB for value in curves[rank.rank]),
                        colour=index,
                    )
                    for index, rank in enumerate(ranks)
                ),
                table=Table(
                    caption=f"{title}, mean in stretches of the run",
                    columns=(
                        Column("Since the beginning"),
                        *(Column(f"Rank {rank.rank}", number=True) for rank in ranks),
                    ),
                    rows=tuple(
                        (called, *(size(mean(curves[rank.rank][part])) for rank in ranks))
                        for called, part in slices(view)
                    ),
                ),
            )
        )
    return blocks


def _curves(view: RunView, name: str) -> dict[int, Curve]:
    curves = {rank.rank: rank.rss_bytes.get(name) or rank.gpu_bytes.get(name) or () for rank in view.ranks}
    return {rank: curve for rank, curve in curves.items() if curve}


def _course(rank: RankView, curve: Curve, what: str) -> str:
    """Describe a memory curve. It has means: the peak is higher, and left out if unknown."""
    known = [value for value in curve if value is not None]
    if not known:
        return ""
    most = f", {size(rank.most_bytes[what])} at most" if what in rank.most_bytes else ""
    return f"Rank {rank.rank}: {size(known[0])} at first, {size(known[-1])} in the end{most}."


def _of_nodes(view: RunView) -> Table:
    def values(name: str) -> list[str]:
        return [size(node.values.get(name)) for node in view.nodes[:MOST_ROWS]]

    hosts = [f"{node.node}: {node.host}" if node.host else str(node.node) for node in view.nodes[:MOST_ROWS]]
    names = (
        *("memory_total_bytes", "memory_available_bytes", "page_cache_bytes", "cgroup_limit_bytes"),
        *("cgroup_used_bytes", "swap_used_bytes", "shm_size_bytes", "shm_used_bytes"),
    )
    titles = ("Total", "Available", "Page cache", "Limit", "Used of it", "Swap used", "shm", "shm used")
    columns = [values(name) for name in names]
    return Table(
        caption="Memory of the nodes when they were seen last",
        columns=(Column("Node"), *(Column(title, number=True) for title in titles)),
        rows=tuple((host, *cells) for host, *cells in zip(hosts, *columns, strict=True)) or ((UNKNOWN,) * 9,),
    )
