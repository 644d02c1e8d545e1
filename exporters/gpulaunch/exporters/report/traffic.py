"""Report sections on copies, waits for the GPU, and the dataloader: by rank and by program line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpulaunch.exporters.report.anatomy import MOST_ROWS
from gpulaunch.exporters.report.document import Block, Chart, Column, Paragraph, Section, Series, Table
from gpulaunch.exporters.report.formatting import amount, percent, rank_list, seconds, size
from gpulaunch.exporters.report.time_axis import chosen, clock_of, known_range
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import RunView, SiteView

_COPIES: Final = ("h2d", "d2h", "d2d", "built_on_cpu")
_WAITS: Final = ("item", "tolist", "numpy", "cpu", "bool", "nonzero", "synchronize")
_MOST_LINES_OF_CODE: Final = 60
_MOST_LINES: Final = 8
_NOBODY: Final = "Nobody watched: nothing is known of this."
_KIND_WORDS: Final = {
    "h2d": "host to GPU",
    "d2h": "GPU to host",
    "d2d": "GPU to GPU",
    "built_on_cpu": "built on the CPU",
    "gc": "collects garbage",
    "elsewhere": "lines without a row",
}


def copies(view: RunView) -> Section:
    """Return the section on copies and waits for the GPU."""
    blocks: list[Block] = [*_by_direction(view), *_waits(view)]
    groups = (
        ("Copies by line", [site for site in view.sites if site.kind in _COPIES]),
        ("Waits for the GPU by line", [site for site in view.sites if site.kind in _WAITS]),
        ("Other lines that take time", [site for site in view.sites if site.kind not in (*_COPIES, *_WAITS)]),
    )
    blocks += [_by_line(title, sites) for title, sites in groups if sites]
    if not blocks:
        said = "No copy between host and GPU, and no wait for a GPU, was seen." if view.watched else _NOBODY
        blocks.append(Paragraph(said))
    return Section(id="copies", title="Copies and waits, by line", blocks=tuple(blocks))


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
            caption="Copies of all ranks together",
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
        )
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
            caption="Waits for the GPU of all ranks together",
            columns=(Column("By"), Column("Calls", number=True), Column("Blocked", number=True)),
            rows=tuple(
                (kind, count(calls), seconds(blocked))
                for kind, (calls, blocked) in sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
            ),
        )
    ]


def _by_line(title: str, sites: Sequence[SiteView]) -> Table:
    titles = ("Times", "Bytes", "Blocked", "On the GPU", "Pinned", "non_blocking")
    more = f" (the first {_MOST_LINES_OF_CODE} of {len(sites)})" if len(sites) > _MOST_LINES_OF_CODE else ""
    return Table(
        caption=f"{title}, newest attempt, ranks together{more}",
        columns=(
            Column("Line", code=True),
            Column("What"),
            Column("Ranks"),
            *(Column(each, number=True) for each in titles),
        ),
        rows=tuple(
            (
                site.text or "all other lines",
                _KIND_WORDS.get(site.kind, site.kind.replace("_", " ")),
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


def loader(view: RunView) -> Section:
    """Return the section on the dataloader of each rank."""
    ranks = chosen([rank for rank in view.ranks if rank.loader is not None], MOST_ROWS)
    if not ranks:
        said = "No batch came from a torch DataLoader." if view.watched else _NOBODY
        return Section(id="loader", title="Dataloader", blocks=(Paragraph(said),))
    titles = (
        *("Batches", "Batch", "Waited", "Each batch", "Handing over", "Behind others", "Workers"),
        *("Preparing", "For a core", "Blocked", "Read", "Cached"),
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
                size(own.batch_bytes / own.batches if own.batches and own.batch_bytes else None),
                seconds(own.wait_seconds),
                seconds(own.wait_seconds / own.batches if own.batches else None),
                seconds(own.transfer_seconds),
                seconds(own.reorder_blocked_seconds),
                count(alive) if configured is None else f"{count(alive)} of {configured}",
                *(seconds(own.worker_seconds.get(name)) for name in ("prep", "contention", "blocked")),
                size(own.storage_bytes),
                size(own.cached_bytes),
            )
        )
    blocks: list[Block] = [
        Paragraph(
            "Waited: the training thread, in all. Handing over: of that, for a batch that was ready. Behind others: of "
            "that, for a batch while later ones were ready. The workers' own time is summed over all of a rank's."
        ),
        Table(
            caption="Dataloader of each rank",
            columns=tuple(Column(title, number=index > 0) for index, title in enumerate(("Rank", *titles))),
            rows=tuple(rows),
        ),
        *_queue(view),
    ]
    return Section(id="loader", title="Dataloader", blocks=tuple(blocks))


def _queue(view: RunView) -> list[Block]:
    ranks = chosen([rank for rank in view.ranks if rank.loader_ready], _MOST_LINES)
    if not ranks:
        return []
    clock = clock_of(view)
    said: list[str] = []
    for rank in ranks:
        reach = known_range(rank.loader_ready)
        if reach is not None:
            said.append(f"rank {rank.rank}: {amount(reach[0])} to {amount(reach[1])}")
    return [
        Chart(
            id="loader-queue",
            title="Batches that were ready, over time",
            kind="lines",
            unit="batches",
            summary=f"Batches ready, {', '.join(said)}.",
            times=clock.times,
            time_unit=clock.unit,
            series=tuple(
                Series(name=f"rank {rank.rank}", values=rank.loader_ready, colour=index)
                for index, rank in enumerate(ranks)
            ),
        )
    ]
