"""The pages, in the order of their keys: each a text, or a table with a row per rank and text above and below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpulaunch.exporters.tui.charts import Line, NamedCurve, Spark
from gpulaunch.exporters.tui.history import history, since
from gpulaunch.exporters.tui.rank import rank_page
from gpulaunch.exporters.tui.selection import Selection, chosen, own_seconds, selected, told_ranks
from gpulaunch.exporters.tui.tables import INPUT, MEMORY, STEPS, Column
from gpulaunch.exporters.tui.text import figure, measured, pairs, place, plain, ratio, seconds, size, took
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.findings import not_profiled
from gpulaunch.exporters.view.model import DeviceView, FindingView, NodeView, RunView
from gpulaunch.exporters.view.rank_model import RankView

_CROWD: Final = 17
"""From this many ranks on, one curve shows all of them side by side."""
_HEADLINES: Final = 3
"""Number of findings below the table of ranks."""
_MOST_NODES: Final = 4
_MOST_DEVICES: Final = 8
_TITLE: Final = "bold underline"


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page that a view is enough for."""

    name: str
    text: Callable[[RunView, Selection], Iterator[RenderableType]]
    """Yields all of it, or what is above the table."""
    columns: tuple[Column, ...] = ()
    """Of its table; () for none."""
    below: Callable[[RunView, Selection], Iterator[RenderableType]] = lambda _, __: iter(())
    ranks: Callable[[RankView], bool] = lambda _: True
    """Which ranks are in the table."""

    def rows(self, view: RunView, selection: Selection) -> list[RankView]:
        """Return the ranks in the table, in their order."""
        return [rank for rank in chosen(view, selection) if self.ranks(rank)] if self.columns else []


# -- ranks


def _ranks(view: RunView, selection: Selection) -> Iterator[RenderableType]:
    ranks = chosen(view, selection)
    if len(view.ranks) >= _CROWD and ranks:
        # A curve of all ranks side by side: the step time of each without waiting for the others.
        own = [own_seconds(rank) for rank in ranks]
        known = [(value, rank.rank) for value, rank in zip(own, ranks, strict=True) if value is not None]
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column()
        table.add_column(no_wrap=True)
        most = f"most {seconds(max(known)[0])} rank {max(known)[1]}" if known else UNKNOWN
        # The slowest of those that share a cell: one in 256 must not vanish in a mean.
        table.add_row(f"{len(ranks)} ranks, own step time", Spark(tuple(own), merge=max), most)
        yield table
    if not view.ranks:
        yield Text("no rank has been seen" + ("" if view.watched else f": {not_profiled(requested=view.profiled)}"))
    elif not ranks:
        yield Text("no rank passes the filter", "dim")


def _headlines(view: RunView, _: Selection) -> Iterator[RenderableType]:
    """Yield the most expensive findings, one line each."""
    findings = [finding for finding in view.findings if finding.active]
    more = len(findings) - _HEADLINES
    if findings:
        yield Text("to change" + (f" ({more} more: key 2)" if more > 0 else ""), _TITLE)
    for each in findings[:_HEADLINES]:
        cost = f"{seconds(each.lost_seconds)} lost" if each.lost_seconds else _cost(each)
        yield Line((f"{plain(each.rule)}{_where(each)}", "bold"), f": {cost}; ", (plain(each.advice), "green"))
    yield from (Text(plain(line), "green") for line in view.tried)
    if not view.ranks:
        yield from (Text(plain(note), "yellow") for note in view.notes)


# -- findings


def _findings(view: RunView, _: Selection) -> Iterator[RenderableType]:
    """Yield what to change, where, and what it costs; largest loss first."""
    if not view.findings:
        yield Text("nothing found" if view.watched else not_profiled(requested=view.profiled), "dim")
    for number, finding in enumerate(view.findings, 1):
        state = "" if finding.active else "  no longer active"
        sure = f"{told_ranks(finding.ranks)}; confidence {ratio(finding.confidence)}"
        details = [
            Text(f"{_cost(finding)}; {sure}; since {since(view, finding.first_seen_s)}"),
            Text(plain(finding.advice), "green"),
            *([Text(measured(finding.evidence), "dim")] if finding.evidence else []),
        ]
        style = "bold" if finding.active else "dim"
        yield Text(f"{number}. {plain(finding.rule)}{_where(finding)}{state}", style)
        yield Padding(Group(*details), (0, 0, number < len(view.findings), 3))


def _where(finding: FindingView) -> str:
    """Return ` file:line (subject)`, as far as known."""
    place = f" {plain(finding.location)}" if finding.location else ""
    return place + (f" ({plain(finding.subject)})" if finding.subject else "")


def _cost(finding: FindingView) -> str:
    if not finding.seconds_per_step:
        return "costs no time, or none yet"
    lost = f"{seconds(finding.lost_seconds)} lost while it stood, " if finding.lost_seconds else ""
    return f"{lost}{seconds(finding.seconds_per_step)} of every step, {took(finding.seconds_per_hour)} of every hour"


# -- input


def _input(view: RunView, selection: Selection) -> Iterator[RenderableType]:
    here = selected(view, selection)
    if here is not None and any(value is not None for value in here.loader_ready):
        yield NamedCurve(f"rank {here.rank}: batches ready", here.loader_ready, figure, lasts=False)
    if not any(rank.loader for rank in chosen(view, selection)):
        yield Text("no rank has used a DataLoader that could be seen", "dim")


def _workers(view: RunView, selection: Selection) -> Iterator[RenderableType]:
    if any(rank.loader for rank in chosen(view, selection)):
        yield Text("workers in fetches: PREP on a core, CONTEND waiting for one, BLOCKED neither", "dim")


# -- copies


def _copies(view: RunView, selection: Selection) -> Iterator[RenderableType]:
    """Yield copies, waits for the GPU, and the most expensive program lines."""
    ranks, here = chosen(view, selection), selected(view, selection)
    if here is not None:
        curves = {way: curve for way, curve in here.copy_bytes_per_second.items() if any(curve)}
        yield from (NamedCurve(f"rank {here.rank}: {plain(way)}/s", curve, size) for way, curve in curves.items())
    copies: dict[tuple[str, str], list[float]] = {}
    waits: dict[str, list[float]] = {}
    for rank in ranks:
        for copy in rank.copies:
            of_copy = (copy.count, copy.size_bytes, copy.blocked_seconds, copy.gpu_seconds)
            _add(copies.setdefault((copy.direction, copy.host_memory), [0.0] * len(of_copy)), of_copy)
        for sync in rank.syncs:
            _add(waits.setdefault(sync.kind, [0.0] * 2), (sync.calls, sync.blocked_seconds))
    if copies:
        table = _table("COPIES of the ranks chosen", "COUNT", "BYTES", "BLOCKED", "ON GPU")
        for (way, kind), (number, of, blocked_s, gpu_s) in sorted(copies.items()):
            table.add_row(plain(f"{way} {kind}"), count(number), size(of), seconds(blocked_s), seconds(gpu_s))
        yield table
    if waits:
        table = _table("WAITS FOR THE GPU", "CALLS", "BLOCKED")
        for kind, (calls, blocked_s) in sorted(waits.items(), key=lambda each: -each[1][1]):
            table.add_row(plain(kind), count(calls), seconds(blocked_s))
        yield table
    if view.sites:
        table = _table("LINES (newest attempt, all ranks)", "COUNT", "BYTES", "BLOCKED")
        table.add_column(overflow="fold")
        for site in view.sites:
            place = f"{plain(site.text) or '(all other lines)'}; {told_ranks(site.ranks)}"
            done = (count(site.count), size(site.size_bytes), seconds(site.blocked_seconds))
            table.add_row(plain(site.kind), *done, Text(place, "dim"))
        yield table
    if not (copies or waits or view.sites):
        yield Text("no copies and no waits for a GPU were seen", "dim")


def _add(into: list[float], values: Sequence[float]) -> None:
    into[:] = [one + other for one, other in zip(into, values, strict=True)]


def _table(title: str, *columns: str) -> Table:
    """Return an empty table of figures with names in front of them."""
    table = Table(title=title, title_justify="left", title_style=_TITLE, box=None, padding=(0, 2, 0, 0))
    table.add_column(min_width=18, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", min_width=8, no_wrap=True)
    return table


# -- memory


def _memory(view: RunView, selection: Selection) -> Iterator[RenderableType]:
    """Yield the memory of nodes and GPUs; with many, of the selected rank's node."""
    here = selected(view, selection)
    first = here.node if here is not None else 0
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column()
    table.add_column(ratio=1, min_width=8)
    for node in sorted(view.nodes, key=lambda node: node.node != first)[:_MOST_NODES]:
        table.add_row(_node(node), Spark(node.memory_available_bytes, most=node.values.get("memory_total_bytes")))
    if view.nodes:
        yield table
    if len(view.nodes) > _MOST_NODES:
        yield Text(f"... {len(view.nodes)} nodes in all", "dim")
    table = Table.grid(padding=(0, 2))
    for device in sorted(view.devices, key=lambda device: device.node != first)[:_MOST_DEVICES]:
        table.add_row(*_device(device, nodes=len(view.nodes) > 1))
    if view.devices:
        yield table
    if len(view.devices) > _MOST_DEVICES:
        yield Text(f"... {len(view.devices)} GPUs in all", "dim")


def _node(node: NodeView) -> str:
    values = node.values
    told = f"{place(node.node, node.host)}: {size(values.get('memory_available_bytes'))} of "
    told += f"{size(values.get('memory_total_bytes'))} available"
    if values.get("cgroup_limit_bytes"):
        told += f", cgroup {size(values.get('cgroup_used_bytes'))} of {size(values['cgroup_limit_bytes'])}"
    if values.get("shm_size_bytes"):
        told += f", /dev/shm {size(values.get('shm_used_bytes'))} of {size(values['shm_size_bytes'])}"
    return told + (f", swap {size(values['swap_used_bytes'])}" if values.get("swap_used_bytes") else "")


def _device(device: DeviceView, *, nodes: bool) -> Iterator[RenderableType]:
    """Yield the cells of a GPU's row."""
    values = device.values
    yield f"gpu {plain(device.gpu)}{f' n{device.node}' if nodes else ''}"
    yield Text(plain(device.model))
    yield f"util {ratio(values.get('utilization_ratio')):>4}"
    yield f"{size(values.get('memory_used_bytes'))}/{size(values.get('memory_total_bytes'))}"
    yield f"{figure(values.get('power_watts'))} W"
    yield f"{figure(values.get('temperature_celsius'))} C"
    yield f"SMs {ratio(values['sm_active_ratio'])}" if "sm_active_ratio" in values else ""
    faults = [f"{word} {count(values[name])}" for name, word in _FAULTS if values.get(name)]
    slowed = {name: seconds(value) for name, value in device.throttle_seconds.items() if value}
    yield Text("  ".join([*faults, *([f"slowed down: {pairs(slowed)}"] if slowed else [])]), "yellow")


_FAULTS: Final = (("xid_errors", "XID"), ("ecc_uncorrected", "ECC"), ("pcie_replays", "PCIe replays"))

PAGES: Final = (
    Page(name="ranks", text=_ranks, columns=STEPS, below=_headlines),
    Page(name="findings", text=_findings),
    Page(name="input", text=_input, columns=INPUT, below=_workers, ranks=lambda rank: rank.loader is not None),
    Page(name="copies", text=_copies),
    Page(name="memory", text=_memory, columns=MEMORY),
    Page(name="history", text=lambda view, _: iter([history(view)])),
    Page(name="rank", text=lambda view, selection: iter([rank_page(view, selection)])),
)
