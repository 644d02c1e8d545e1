"""Sections on copies, synchronization and the dataloader: by rank and by program line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpulaunch.exporters.report.anatomy import MOST_ROWS
from gpulaunch.exporters.report.document import Block, Chart, Column, Paragraph, Section, Series, Table
from gpulaunch.exporters.report.formatting import amount, percent, rank_list, seconds, size, words
from gpulaunch.exporters.report.rank_curves import RankCurves
from gpulaunch.exporters.report.time_axis import chosen
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import RunView
from gpulaunch.exporters.view.rank_model import Curve, RankView, SiteView

_COPIES: Final = ("h2d", "d2h", "d2d", "built_on_cpu")
_WAITS: Final = ("item", "tolist", "numpy", "cpu", "bool", "nonzero", "synchronize")
_MOST_LINES_OF_CODE: Final = 60
_MOST_BARS: Final = 10
_UNOBSERVED: Final = "Unknown: the run was not profiled."
_KIND_WORDS: Final = {
    "h2d": "host to GPU",
    "d2h": "GPU to host",
    "d2d": "GPU to GPU",
    "built_on_cpu": "built on the CPU",
    "gc": "garbage collection",
    "elsewhere": "all other lines",
}


def copies(view: RunView, curves: RankCurves) -> Section:
    """Return the section on copies and waits for the GPU."""
    blocks: list[Block] = [*_rates(curves), *_dearest(view), *_by_direction(view), *_waits(view)]
    groups = (
        ("Copies by line", [site for site in view.sites if site.kind in _COPIES]),
        ("Synchronization by line", [site for site in view.sites if site.kind in _WAITS]),
        ("Other lines", [site for site in view.sites if site.kind not in (*_COPIES, *_WAITS)]),
    )
    blocks += [_by_line(title, sites) for title, sites in groups if sites]
    if not blocks:
        said = (
            "No copy between host and GPU and no synchronization with a GPU was observed."
            if view.watched
            else _UNOBSERVED
        )
        blocks.append(Paragraph(said))
    return Section(id="copies", title="Copies and synchronization", blocks=tuple(blocks))


def _rates(curves: RankCurves) -> list[Block]:
    blocks: list[Block] = []
    for direction in _COPIES:

        def curve_of(rank: RankView, direction: str = direction) -> Curve:
            return rank.copy_bytes_per_second.get(direction, ())

        blocks += curves.chart(
            f"copied-{direction}",
            f"Copied per second, {_KIND_WORDS[direction]}",
            "MB/s",
            curve_of,
            lambda value: f"{size(value)}/s",
            factor=1e-6,
        )
    return blocks


def _dearest(view: RunView) -> list[Block]:
    """Return the chart of the lines of the program that cost most."""
    sites = [site for site in view.sites if site.blocked_seconds + site.gpu_seconds > 0][:_MOST_BARS]
    if not sites:
        return []
    return [
        Chart(
            id="dearest-lines",
            title="Lines with the highest cost",
            kind="bars",
            unit="s",
            summary=f"{sites[0].text or 'other lines'}: {seconds(sites[0].blocked_seconds)} blocked, all ranks.",
            labels=tuple(_end_of(site.text) for site in sites),
            series=(
                Series(name="blocked", values=tuple(site.blocked_seconds for site in sites), colour=1),
                Series(name="on the GPU", values=tuple(site.gpu_seconds for site in sites), colour=0),
            ),
        )
    ]


def _end_of(place: str) -> str:
    """The last part of a path is what one knows it by."""
    return place.rsplit("/", 1)[-1] or "other lines"


def _by_direction(view: RunView) -> list[Block]:
    sums: dict[tuple[str, str], list[float]] = {}
    for rank in view.ranks:
        for copy in rank.copies:
            row = sums.setdefault((copy.direction, copy.host_memory), [0.0] * 4)
            for index, value in enumerate((copy.count, copy.size_bytes, copy.blocked_seconds, copy.gpu_seconds)):
                row[index] += value
    if not sums:
        return []
    return [
        Table(
            caption="Copies, all ranks together",
            columns=(
                Column("Direction"),
                Column("Host memory"),
                *(Column(title, number=True) for title in ("Copies", "Bytes", "Mean", "Blocked", "On the GPU")),
            ),
            rows=tuple(
                (
                    _KIND_WORDS.get(direction, direction),
                    memory or UNKNOWN,
                    count(number),
                    size(total),
                    size(total / number if number else None),
                    seconds(blocked),
                    seconds(gpu) if gpu else UNKNOWN,
                )
                for (direction, memory), (number, total, blocked, gpu) in sorted(
                    sums.items(), key=lambda item: (-item[1][2], item[0])
                )
            ),
        ),
        Table(
            caption="Copies by rank",
            columns=(
                *(Column(title) for title in ("Rank", "Direction", "Host memory")),
                *(Column(title, number=True) for title in ("Copies", "Bytes", "Blocked", "On the GPU")),
            ),
            rows=tuple(
                (
                    str(rank.rank),
                    _KIND_WORDS.get(copy.direction, copy.direction),
                    copy.host_memory or UNKNOWN,
                    count(copy.count),
                    size(copy.size_bytes),
                    seconds(copy.blocked_seconds),
                    seconds(copy.gpu_seconds),
                )
                for rank in chosen(view.ranks, MOST_ROWS)
                for copy in rank.copies
            ),
        ),
    ]


def _waits(view: RunView) -> list[Block]:
    sums: dict[str, list[float]] = {}
    for rank in view.ranks:
        for sync in rank.syncs:
            row = sums.setdefault(sync.kind, [0.0, 0.0])
            row[0] += sync.calls
            row[1] += sync.blocked_seconds
    if not sums:
        return []
    return [
        Table(
            caption="Synchronization with the GPU, all ranks together",
            columns=(Column("By"), Column("Calls", number=True), Column("Blocked", number=True)),
            rows=tuple(
                (kind, count(calls), seconds(blocked))
                for kind, (calls, blocked) in sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
            ),
        ),
        Table(
            caption="Synchronization with the GPU by rank",
            columns=(Column("Rank"), Column("By"), Column("Calls", number=True), Column("Blocked", number=True)),
            rows=tuple(
                (str(rank.rank), sync.kind, count(sync.calls), seconds(sync.blocked_seconds))
                for rank in chosen(view.ranks, MOST_ROWS)
                for sync in rank.syncs
            ),
        ),
    ]


def _by_line(title: str, sites: Sequence[SiteView]) -> Table:
    titles = ("Times", "Bytes", "Blocked", "On the GPU", "Pinned", "non_blocking")
    more = f" (the first {_MOST_LINES_OF_CODE} of {len(sites)})" if len(sites) > _MOST_LINES_OF_CODE else ""
    return Table(
        caption=f"{title}, newest attempt, all ranks together{more}",
        columns=(
            Column("Line", code=True),
            Column("Kind"),
            Column("Ranks"),
            *(Column(each, number=True) for each in titles),
        ),
        rows=tuple(
            (
                site.text or "all other lines",
                _KIND_WORDS.get(site.kind, words(site.kind)),
                rank_list(site.ranks),
                count(site.count),
                size(site.size_bytes) if site.size_bytes else UNKNOWN,
                seconds(site.blocked_seconds),
                seconds(site.gpu_seconds) if site.gpu_seconds else UNKNOWN,
                _of(site.pinned, site),
                _of(site.non_blocking, site),
            )
            for site in sites[:_MOST_LINES_OF_CODE]
        ),
    )


def _of(number: int, site: SiteView) -> str:
    return percent(number / site.count) if site.kind in _COPIES and site.count else UNKNOWN


def loader(view: RunView, curves: RankCurves) -> Section:
    """Return the section on the dataloader of each rank."""
    ranks = chosen([rank for rank in view.ranks if rank.loader is not None], MOST_ROWS)
    if not ranks:
        said = "No batch from a torch DataLoader was observed." if view.watched else _UNOBSERVED
        return Section(id="loader", title="Dataloader", blocks=(Paragraph(said),))
    titles = (
        *(
            "Batches",
            "Bytes",
            "Batch size",
            "Data wait",
            "Wait per batch",
            "Transfer",
            "Out of order",
            "Ready",
            "Workers",
        ),
        *("Preparing", "Waiting for a core", "Blocked", "Read", "Cached"),
    )
    rows: list[tuple[str, ...]] = []
    for rank in ranks:
        own = rank.loader
        assert own is not None, "only ranks that have one"
        alive, configured = own.workers_alive, own.workers_configured
        rows.append(
            (
                str(rank.rank),
                count(own.batches),
                size(own.batch_bytes),
                size(own.batch_bytes / own.batches if own.batches and own.batch_bytes else None),
                seconds(own.wait_seconds),
                seconds(own.wait_seconds / own.batches if own.batches else None),
                seconds(own.transfer_seconds),
                seconds(own.reorder_blocked_seconds),
                count(own.ready),
                count(alive) if configured is None else f"{count(alive)} of {configured}",
                *(seconds(own.worker_seconds.get(name)) for name in ("prep", "contention", "blocked")),
                size(own.storage_bytes),
                size(own.cached_bytes),
            )
        )
    blocks: list[Block] = [
        Paragraph(
            "Data wait: the total time that the training thread waited for batches. Transfer: the part of it spent on "
            "a batch that was ready. Out of order: the part in which later batches were ready. Times of workers are "
            "sums over all workers of a rank."
        ),
        Table(
            caption="Dataloader by rank",
            columns=tuple(Column(title, number=index > 0) for index, title in enumerate(("Rank", *titles))),
            rows=tuple(rows),
        ),
        *curves.chart("loader-queue", "Batches ready", "batches", lambda rank: rank.loader_ready, amount),
    ]
    return Section(id="loader", title="Dataloader", blocks=tuple(blocks))
