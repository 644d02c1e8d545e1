"""Section on memory of the ranks, their GPUs and their nodes."""

from __future__ import annotations

from typing import Final

from gpulaunch.exporters.report.anatomy import MOST_ROWS
from gpulaunch.exporters.report.document import Block, Chart, Column, Paragraph, Section, Series, Table
from gpulaunch.exporters.report.formatting import size
from gpulaunch.exporters.report.rank_curves import FEW, RankCurves
from gpulaunch.exporters.report.time_axis import chosen, over_time
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import RunView
from gpulaunch.exporters.view.rank_model import Curve, RankView

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_STATES: Final = ("allocated", "reserved")


def section(view: RunView, curves: RankCurves) -> Section:
    """Return the section."""
    ranks = [rank for rank in view.ranks if rank.memory.rss_bytes or rank.memory.gpu_bytes]
    blocks: list[Block] = []
    shown = chosen(ranks, MOST_ROWS)
    if shown:
        blocks.append(_by_rank(shown))
    if any(rank.memory.gpu_bytes for rank in shown):
        blocks.append(_on_gpu(shown))
    blocks += _over_time(view, curves)
    if view.nodes:
        blocks.append(_of_nodes(view))
    return Section(id="memory", title="Memory", blocks=tuple(blocks) or (Paragraph("Memory was not measured."),))


def _by_rank(ranks: list[RankView]) -> Table:
    return Table(
        caption="Host memory by rank, last sample (RSS counts shared pages in each process, PSS in proportion)",
        columns=tuple(
            Column(title, number=index > 0)
            for index, title in enumerate(
                ("Rank", "Trainer RSS", "Workers RSS", "Trainer PSS", "Workers PSS", "Batches in shm")
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
    titles = (
        "Rank",
        "Allocated",
        "Reserved",
        "Peak allocated",
        "Peak reserved",
        "Pinned host memory",
        "Retries",
        "OOMs",
    )
    return Table(
        caption="GPU memory by rank, as reported by torch's allocator",
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


def _over_time(view: RunView, curves: RankCurves) -> list[Block]:
    blocks: list[Block] = []
    for name, title, what in (
        ("host-memory", "Trainer RSS", "trainer"),
        ("worker-memory", "Dataloader workers RSS", "workers"),
        ("gpu-memory", "GPU memory allocated", "allocated"),
        ("gpu-memory-reserved", "GPU memory reserved", "reserved"),
    ):

        def curve_of(rank: RankView, what: str = what) -> Curve:
            return rank.rss_bytes.get(what) or rank.gpu_bytes.get(what) or ()

        said = [_course(rank, curve_of(rank), what) for rank in view.ranks]
        few = " ".join(each for each in said if each) if len(view.ranks) <= FEW else ""
        blocks += curves.chart(name, title, "MiB", curve_of, size, summary=few, factor=1 / _MIB)
    return [*blocks, *_available(view)]


def _available(view: RunView) -> tuple[Chart, ...]:
    nodes = [node for node in view.nodes if node.memory_available_bytes][:FEW]
    return over_time(
        view,
        "available-memory",
        "Memory available by node",
        "GiB",
        "The table below has the last sample.",
        [
            Series(name=f"node {node.node}", values=node.memory_available_bytes, colour=index)
            for index, node in enumerate(nodes)
        ],
        factor=1 / _GIB,
    )


def _course(rank: RankView, curve: Curve, what: str) -> str:
    """Describe a memory curve. It has means: the peak is higher, and left out if unknown."""
    known = [value for value in curve if value is not None]
    if not known:
        return ""
    most = f", {size(rank.most_bytes[what])} at most" if what in rank.most_bytes else ""
    return f"Rank {rank.rank}: {size(known[0])} at the start, {size(known[-1])} at the end{most}."


def _of_nodes(view: RunView) -> Table:
    def values(name: str) -> list[str]:
        return [size(node.values.get(name)) for node in view.nodes[:MOST_ROWS]]

    hosts = [f"{node.node}: {node.host}" if node.host else str(node.node) for node in view.nodes[:MOST_ROWS]]
    names = (
        *("memory_total_bytes", "memory_available_bytes", "page_cache_bytes", "cgroup_limit_bytes"),
        *("cgroup_used_bytes", "swap_used_bytes", "shm_size_bytes", "shm_used_bytes"),
    )
    titles = ("Total", "Available", "Page cache", "cgroup limit", "cgroup used", "Swap used", "shm size", "shm used")
    columns = [values(name) for name in names]
    return Table(
        caption="Memory by node, last sample",
        columns=(Column("Node"), *(Column(title, number=True) for title in titles)),
        rows=tuple((host, *cells) for host, *cells in zip(hosts, *columns, strict=True)) or ((UNKNOWN,) * 9,),
    )
