"""Pages about one rank: its data, its log, and the output of a dump or a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpulaunch.exporters.tui.cells import (
    Line,
    broken,
    clip,
    curve_line,
    figure,
    fit,
    line,
    pairs,
    plain,
    ratio,
    seconds,
    size,
    wrap,
)
from gpulaunch.exporters.tui.look import Body, Look
from gpulaunch.exporters.tui.phases import legend, shares_bar
from gpulaunch.exporters.tui.ranks import marks_of, own_seconds, selected, steps_of
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import CostView, LoaderView, RankView, RunView, Status


def rank_page(view: RunView, look: Look, width: int) -> Body:
    """Return the page of the selected rank."""
    rank = selected(view, look)
    if rank is None:
        return Body(rows=(line(("no rank to show", "dim")),))
    mark = marks_of(view).get(rank.rank)
    head = f"rank {rank.rank}  node {rank.node}  local rank {_number(rank.local_rank)}  pid {_number(rank.pid)}"
    head += f"  steps end with: {plain(rank.step_source)}" if rank.step_source else ""
    rows: list[Line] = [line((head, "strong"), (f"  {mark}" if mark else "", "bad"))]
    rows.append(
        line(
            f"{steps_of(rank)}  {count(rank.samples)} samples  {figure(rank.steps_per_second_now)} steps/s"
            f"  {seconds(rank.step_seconds_now)} a step, {seconds(own_seconds(rank))} without waiting for others"
        )
    )
    if view.status is Status.RUNNING:
        rows += _shares("now", rank.phase_ratios_now, width)
    total = sum(rank.phase_seconds.values())
    if total:
        rows += _shares("all", {name: value / total for name, value in rank.phase_seconds.items()}, width)
    gpu_total = sum(rank.gpu_phase_seconds.values())
    if gpu_total:
        rows += _shares("gpu", {name: value / gpu_total for name, value in rank.gpu_phase_seconds.items()}, width)
    rows += _curves(rank, look, width)
    rows += [line(each) for text in _figures(rank) for each in wrap(text, width, indent="  ")]
    mine = [finding for finding in view.findings if rank.rank in finding.ranks and finding.active]
    rows += [
        line((each, "good"))
        for finding in mine
        for each in wrap(f"found: {plain(finding.rule)}: {plain(finding.advice)}", width, indent="  ")
    ]
    return Body(rows=tuple(clip(each, width) for each in rows))


def _shares(name: str, shares: Mapping[str, float], width: int) -> list[Line]:
    if not shares:
        return []
    return [
        line((f"{name:<6}", "dim"), *shares_bar(shares, max(8, width - 6))),
        line("      ", *legend(shares, width - 6)),
    ]


def _curves(rank: RankView, look: Look, width: int) -> list[Line]:
    told = [
        ("steps/s", rank.steps_per_second, figure),
        ("step", rank.step_mean_seconds, seconds),
        *(
            (f"{plain(phase)}", curve, ratio)
            for phase, curve in rank.phase_ratios.items()
            if phase in ("data_wait", "comm")
        ),
        ("batches ready", rank.loader_ready, figure),
        *((f"memory {plain(who)}", curve, size) for who, curve in rank.rss_bytes.items()),
        *((f"gpu {plain(kind)}", curve, size) for kind, curve in rank.gpu_bytes.items()),
        *((f"{plain(way)}/s", curve, size) for way, curve in rank.copy_bytes_per_second.items()),
    ]
    return [
        curve_line(
            fit(name, 16), curve, figure_of, width, ascii_only=look.ascii_only, lasts=curve is not rank.loader_ready
        )
        for name, curve, figure_of in told
        if any(value for value in curve)
    ]


def _figures(rank: RankView) -> Iterator[str]:
    """Yield lines of the known values."""
    if rank.loader is not None:
        yield _input(rank.loader)
    for copy in rank.copies:
        yield (
            f"copies {plain(copy.direction)} {plain(copy.host_memory)}: {count(copy.count)}, {size(copy.size_bytes)}, "
            f"stood still {seconds(copy.blocked_seconds)}, on the GPU {seconds(copy.gpu_seconds)}"
        )
    for sync in rank.syncs:
        yield f"waits for the GPU, {plain(sync.kind)}: {count(sync.calls)}, {seconds(sync.blocked_seconds)}"
    held = {f"rss {who}": size(value) for who, value in rank.memory.rss_bytes.items()}
    held |= {f"gpu {kind}": size(value) for kind, value in rank.memory.gpu_bytes.items()}
    if held:
        yield f"memory: {pairs(held)}"
    if rank.cores_now:
        yield f"cores in use: {pairs({who: figure(used) for who, used in rank.cores_now.items()})}"
    if rank.pauses is not None:
        yield (
            f"pauses: garbage collection {seconds(rank.pauses.gc_seconds)} ({count(rank.pauses.gc_collections)}), "
            f"compiling {seconds(rank.pauses.compile_seconds)} ({count(rank.pauses.compiles)}), own "
            f"collectives {seconds(rank.pauses.comm_blocked_seconds)} ({count(rank.pauses.comm_calls)})"
        )
    if rank.collectives is not None:
        yield (
            f"collectives: number {_number(rank.collectives.sequence)}, {_number(rank.collectives.completed)} of "
            f"{_number(rank.collectives.enqueued)} done; {pairs(rank.collectives.calls)}"
        )
    if rank.cost is not None:
        yield _cost(rank.cost)


def _input(loader: LoaderView) -> str:
    return (
        f"input: {count(loader.batches)} batches, {size(loader.batch_bytes)} in all, waited "
        f"{seconds(loader.wait_seconds)}, of that {seconds(loader.transfer_seconds)} for a batch that was ready and "
        f"{seconds(loader.reorder_blocked_seconds)} for one out of order; workers {_number(loader.workers_alive)} of "
        f"{_number(loader.workers_configured)}"
    )


def _cost(cost: CostView) -> str:
    told = f"being measured: {seconds(cost.probe_seconds)} in the probe"
    if cost.unobserved_steps:
        told += f"; {count(cost.unobserved_steps)} steps were not observed, for the budget"
    if cost.parts_unavailable:
        told += f"; out of service: {plain(', '.join(cost.parts_unavailable))}"
    return told + (f" ({plain(cost.fault)})" if cost.fault else "")


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


# -- its log, and the output of commands


def log_page(view: RunView, look: Look, width: int) -> Body:
    """Return the page with the end of a stream of the selected rank."""
    rank = selected(view, look)
    if rank is None:
        return Body(rows=(line(("no rank to show the log of", "dim")),))
    tail = look.log
    if tail is None or tail.place.rank != rank.rank:
        return Body(rows=(line((f"reading the log of rank {rank.rank}", "dim")),))
    head = f"{tail.path}  {size(tail.size_bytes)}" + ("  (its end)" if tail.earlier else "")
    title = clip(line((plain(head), "title")), width)
    if tail.trouble:
        return Body(head=(title,), rows=tuple(line((each, "warn")) for each in wrap(plain(tail.trouble), width)))
    rows = [line(part) for text in tail.lines for part in broken(text, width)]
    if not rows:
        rows = [line(("nothing yet", "dim"))]
    return Body(head=(title,), rows=tuple(rows), follow=True)


def output_page(look: Look, width: int) -> Body:
    """Return the page with the output of the last dump or trace."""
    output = look.output
    if output is None:
        return Body(rows=(line(("d dumps the stack of the selected rank, t traces it, T all ranks", "dim")),))
    state = " ..." if output.running else ""
    title = clip(line((plain(output.title) + state, "title")), width)
    rows = tuple(line(part) for text in output.lines for part in broken(plain(text), width))
    return Body(head=(title,), rows=rows, follow=output.follow)
