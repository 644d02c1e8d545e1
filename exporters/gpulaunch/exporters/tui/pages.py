"""The pages on findings, input, copies and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gpulaunch.exporters.tui.cells import (
    Line,
    clip,
    curve_line,
    figure,
    fit,
    line,
    measured,
    pairs,
    plain,
    ratio,
    seconds,
    size,
    spark,
    took,
    wrap,
)
from gpulaunch.exporters.tui.look import Body, Drawn, Look
from gpulaunch.exporters.tui.ranks import chosen, selected, told_ranks
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.findings import nobody_watched
from gpulaunch.exporters.view.model import Curve, FindingView, LoaderView, RankView, RunView


def _table(
    title: str, ranks: Sequence[RankView], here: RankView | None, row: Callable[[RankView], str], width: int
) -> tuple[Line, Sequence[Line], int | None]:
    """Return title, rows and index of the selected row of a table with a row per rank."""

    def draw(at: int) -> Line:
        rank = ranks[at]
        style = "selected" if rank is here else ""
        return clip(line((f"{'>' if rank is here else ' '}{rank.rank:>5} {row(rank)}", style)), width)

    focus = next((at for at, rank in enumerate(ranks) if rank is here), None)
    return clip(line((f"  RANK {title}", "title")), width), Drawn(len(ranks), draw), focus


def since(view: RunView, at_s: float | None) -> str:
    """Return a timestamp as time since the run began."""
    if at_s is None or view.began_s is None:
        return UNKNOWN
    passed_s = at_s - view.began_s  # negative: from an earlier run in the same directory
    return f"{'+' if passed_s >= 0 else '-'}{took(abs(passed_s))}"


# -- findings


def findings_page(view: RunView, width: int) -> Body:
    """Return the page on what to change, where, and what it costs; largest loss first."""
    if not view.findings:
        told = "nothing found" if view.watched else nobody_watched(profiled=view.profiled)
        return Body(rows=(line((told, "dim")),))
    rows: list[Line] = []
    for number, finding in enumerate(view.findings, 1):
        if rows:
            rows.append(line(""))
        state = "" if finding.active else "  not any more"
        head = f"{number}. {plain(finding.rule)}{where(finding)}{state}"
        rows += [line((each, "strong" if finding.active else "dim")) for each in wrap(head, width, indent="   ")]
        sure = f"; {told_ranks(finding.ranks)}; confidence {ratio(finding.confidence)}; since "
        sure += since(view, finding.first_seen_s)
        rows += [line(each) for each in wrap(f"   {costs(finding)}{sure}", width, indent="   ")]
        rows += [line((each, "good")) for each in wrap(f"   {plain(finding.advice)}", width, indent="   ")]
        if finding.evidence:
            rows += [line((each, "dim")) for each in wrap(f"   {measured(finding.evidence)}", width, indent="   ")]
    return Body(rows=tuple(rows))


def where(finding: FindingView) -> str:
    """Return ` file:line (subject)`, as far as known."""
    number = "" if finding.line is None else f":{finding.line}"
    place = f" {plain(finding.file)}{number}" if finding.file else ""
    return place + (f" ({plain(finding.subject)})" if finding.subject else "")


def costs(finding: FindingView) -> str:
    """Say what a finding costs."""
    if not finding.seconds_per_step:
        return "costs no time, or none yet"
    lost = f"{seconds(finding.lost_seconds)} lost while it stood, " if finding.lost_seconds else ""
    return f"{lost}{seconds(finding.seconds_per_step)} of every step, {took(finding.seconds_per_hour)} of every hour"


# -- input


def input_page(view: RunView, look: Look, width: int) -> Body:
    """Return the page on input: the dataloader of each rank, and its workers."""
    ranks, here = chosen(view, look), selected(view, look)
    with_loader = [rank for rank in ranks if rank.loader is not None]
    head: list[Line] = []
    if here is not None and any(value is not None for value in here.loader_ready):
        head.append(
            curve_line(
                f"rank {here.rank}: batches ready",
                here.loader_ready,
                figure,
                width,
                ascii_only=look.ascii_only,
                lasts=False,
            )
        )
    if not with_loader:
        return Body(rows=(line(("no rank has used a DataLoader that could be seen", "dim")),))
    title, rows, focus = _table(
        "WAIT/STEP  WAITED READY WORKERS   PREP CONTEND BLOCKED BATCHES STORAGE",
        with_loader,
        here if look.cursor else None,
        lambda rank: _loader(rank, rank.loader) if rank.loader else "",
        width,
    )
    return Body(head=(*head, title), rows=rows, focus=focus, tail=(line((_WORKERS, "dim")),))


_WORKERS: Final = "workers in fetches: PREP on a core, CONTEND waiting for one, BLOCKED neither"


def _loader(rank: RankView, loader: LoaderView) -> str:
    now = rank.phase_ratios_now
    wait = ratio(now.get("data_wait", 0.0)) if now else UNKNOWN
    ready = f"{_number(loader.ready)}/{_number(loader.outstanding)}"
    workers = f"{_number(loader.workers_alive)}/{_number(loader.workers_configured)}"
    spent = loader.worker_seconds
    total = sum(spent.values())
    shares = [ratio(spent[name] / total if total else None) if name in spent else UNKNOWN for name in _SHARES]
    return (
        f"{wait:>9} {seconds(loader.wait_seconds):>7} {ready:>5} {workers:>7} {shares[0]:>6} {shares[1]:>7}"
        f" {shares[2]:>7} {figure(loader.batches):>7} {size(loader.storage_bytes):>7}"
    )


_SHARES: Final = ("prep", "contention", "blocked")


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


# -- copies


def copies_page(view: RunView, look: Look, width: int) -> Body:
    """Return the page on copies, waits for the GPU, and the most expensive program lines."""
    ranks = chosen(view, look)
    rows: list[Line] = []
    copies: dict[tuple[str, str], list[float]] = {}
    waits: dict[str, list[float]] = {}
    for rank in ranks:
        for copy in rank.copies:
            into = copies.setdefault((copy.direction, copy.host_memory), [0.0] * 4)
            for at, value in enumerate((copy.count, copy.size_bytes, copy.blocked_seconds, copy.gpu_seconds)):
                into[at] += value
        for sync in rank.syncs:
            wait = waits.setdefault(sync.kind, [0.0] * 2)
            wait[0] += sync.calls
            wait[1] += sync.blocked_seconds
    here = selected(view, look)
    if here is not None:
        for direction, curve in here.copy_bytes_per_second.items():
            if any(curve):
                rows.append(
                    curve_line(
                        f"rank {here.rank}: {plain(direction)}/s", curve, size, width, ascii_only=look.ascii_only
                    )
                )
    if copies:
        rows.append(line(("COPIES of the ranks chosen     COUNT    BYTES  BLOCKED  ON GPU", "title")))
        for (direction, memory), (number, bytes_, blocked, on_gpu) in sorted(copies.items()):
            name = fit(f"{plain(direction)} {plain(memory)}", 27)
            rows.append(line(f"{name} {count(number):>8} {size(bytes_):>8} {seconds(blocked):>8} {seconds(on_gpu):>7}"))
    if waits:
        rows.append(line(("WAITS FOR THE GPU              CALLS  BLOCKED", "title")))
        rows += [
            line(f"{fit(plain(kind), 27)} {count(calls):>8} {seconds(blocked):>8}")
            for kind, (calls, blocked) in sorted(waits.items(), key=lambda each: -each[1][1])
        ]
    if view.sites:
        rows.append(line(("LINES (newest attempt, all ranks) COUNT    BYTES  BLOCKED", "title")))
        for site in view.sites:
            place = plain(site.text) or "(all other lines)"
            told = f"{fit(plain(site.kind), 27)} {count(site.count):>11} {size(site.size_bytes):>8}"
            rows.append(line(f"{told} {seconds(site.blocked_seconds):>8}"))
            rows += [
                line((each, "dim")) for each in wrap(f"    {place}; {told_ranks(site.ranks)}", width, indent="    ")
            ]
    if not rows:
        rows.append(line(("no copies and no waits for a GPU were seen", "dim")))
    return Body(rows=tuple(rows))


# -- memory


def memory_page(view: RunView, look: Look, width: int) -> Body:
    """Return the page on memory of nodes and GPUs, then of each rank."""
    head: list[Line] = []
    ranks, here = chosen(view, look), selected(view, look)
    first = here.node if here is not None else 0  # with many, those of the selected rank's node
    nodes = sorted(view.nodes, key=lambda node: node.node != first)
    devices = sorted(view.devices, key=lambda device: device.node != first)
    for node in nodes[:_MOST_NODES]:
        head += _node(node.node, node.values, node.memory_available_bytes, look, width)
    if len(view.nodes) > _MOST_NODES:
        head.append(line((f"... {len(view.nodes)} nodes in all", "dim")))
    for device in devices[:_MOST_DEVICES]:
        head.append(
            clip(line(_device(device.node, device.gpu, device.model, device.values, len(view.nodes) > 1)), width)
        )
        if device.throttle_seconds and any(device.throttle_seconds.values()):
            slowed = {name: seconds(value) for name, value in device.throttle_seconds.items() if value}
            head.append(clip(line((f"      slowed down: {pairs(slowed)}", "warn")), width))
    if len(view.devices) > _MOST_DEVICES:
        head.append(line((f"... {len(view.devices)} GPUs in all", "dim")))
    title, rows, focus = _table(
        "TRAINER WORKERS   PSS  IN SHM |  ALLOC RESERVED   PEAK PINNED RETRY OOM",
        ranks,
        here if look.cursor else None,
        _memory_row,
        width,
    )
    return Body(head=(*head, title), rows=rows or (line((UNKNOWN, "dim")),), focus=focus)


_MOST_NODES: Final = 4
_MOST_DEVICES: Final = 8


def _node(node: int, values: Mapping[str, float], curve: Curve, look: Look, width: int) -> list[Line]:
    free, total = values.get("memory_available_bytes"), values.get("memory_total_bytes")
    told = f"node {node}: {size(free)} of {size(total)} available"
    if values.get("cgroup_limit_bytes"):
        told += f", cgroup {size(values.get('cgroup_used_bytes'))} of {size(values['cgroup_limit_bytes'])}"
    if values.get("shm_size_bytes"):
        told += f", /dev/shm {size(values.get('shm_used_bytes'))} of {size(values['shm_size_bytes'])}"
    if values.get("swap_used_bytes"):
        told += f", swap {size(values['swap_used_bytes'])}"
    room = width - len(told) - 2
    if room >= 8 and any(value is not None for value in curve):
        drawn = spark(curve, min(room, 30), ascii_only=look.ascii_only, most=total)
        return [clip(line(told, "  ", (drawn, "curve")), width)]
    return [line(each) for each in wrap(told, width, indent="  ")]


def _device(node: int, gpu: str, model: str, values: Mapping[str, float], nodes: bool) -> str:
    name = f"gpu {plain(gpu)}{f' n{node}' if nodes else ''} {plain(model)}"
    parts = [
        fit(name, 26),
        f"util {ratio(values.get('utilization_ratio')):>4}",
        f"{size(values.get('memory_used_bytes'))}/{size(values.get('memory_total_bytes'))}",
        f"{figure(values.get('power_watts'))} W",
        f"{figure(values.get('temperature_celsius'))} C",
    ]
    if "sm_active_ratio" in values:
        parts.append(f"SMs {ratio(values['sm_active_ratio'])}")
    parts += [f"{word} {count(values[name])}" for name, word in _FAULTS if values.get(name)]
    return "  ".join(parts)


_FAULTS: Final = (("xid_errors", "XID"), ("ecc_uncorrected", "ECC"), ("pcie_replays", "PCIe replays"))


def _memory_row(rank: RankView) -> str:
    memory = rank.memory
    gpu = memory.gpu_bytes
    pss = sum(memory.pss_bytes.values()) if "trainer" in memory.pss_bytes else None
    return (
        f"{size(memory.rss_bytes.get('trainer')):>7} {size(memory.rss_bytes.get('workers')):>7} {size(pss):>5}"
        f" {size(memory.shm_inflight_bytes):>7} | {size(gpu.get('allocated')):>6} {size(gpu.get('reserved')):>8}"
        f" {size(gpu.get('peak_allocated')):>6} {size(memory.pinned_bytes):>6} {_number(memory.alloc_retries):>5}"
        f" {_number(memory.ooms):>3}"
    )
