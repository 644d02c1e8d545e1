"""The page of one rank: everything that is known of it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from gpulaunch.exporters.tui.charts import NamedCurve, legend
from gpulaunch.exporters.tui.selection import Selection, marks_of, own_seconds, selected
from gpulaunch.exporters.tui.summary import shares
from gpulaunch.exporters.tui.text import figure, number, pairs, place, plain, ratio, seconds, size
from gpulaunch.exporters.view.figures import count
from gpulaunch.exporters.view.model import RunView, Status
from gpulaunch.exporters.view.rank_model import CostView, LoaderView, RankView

_NAME_CELLS = 16


def rank_page(view: RunView, selection: Selection) -> Group:
    """Return the page of the selected rank."""
    rank = selected(view, selection)
    if rank is None:
        return Group(Text("no rank to show", "dim"))
    mark = marks_of(view).get(rank.rank, "")
    host = next((node.host for node in view.nodes if node.node == rank.node), "")
    head = f"rank {rank.rank}  {place(rank.node, host)}  local rank {number(rank.local_rank)}  pid {number(rank.pid)}"
    head += f"  steps end with: {plain(rank.step_source)}" if rank.step_source else ""
    mine = [finding for finding in view.findings if rank.rank in finding.ranks and finding.active]
    return Group(
        Text.assemble((head, "bold"), (f"  {mark}" if mark else "", "bold red")),
        Text(
            f"{_steps(rank)}  {count(rank.samples)} samples  {figure(rank.steps_per_second_now)} steps/s"
            f"  {seconds(rank.step_seconds_now)} a step, {seconds(own_seconds(rank))} without waiting for others"
        ),
        *_shares(view, rank),
        *_curves(rank),
        *map(Text, _figures(rank)),
        *(Text(f"found: {plain(finding.rule)}: {plain(finding.advice)}", "green") for finding in mine),
    )


def _steps(rank: RankView) -> str:
    """Return the number of steps of a rank, by kind."""
    told = f"{count(rank.steps)} steps"
    if (rank.microsteps or 0) > (rank.steps or 0):
        told += f" ({count(rank.microsteps)} microsteps)"
    return told + (f", {count(rank.skipped_steps)} skipped" if rank.skipped_steps else "")


def _shares(view: RunView, rank: RankView) -> Iterator[RenderableType]:
    if view.status is Status.RUNNING and rank.phase_ratios_now:
        yield shares("now", rank.phase_ratios_now, legend(rank.phase_ratios_now))
    for label, spent in (("all", rank.phase_seconds), ("gpu", rank.gpu_phase_seconds)):
        if total := sum(spent.values()):
            of = {name: value / total for name, value in spent.items()}
            yield shares(label, of, legend(of))


def _curves(rank: RankView) -> Iterator[RenderableType]:
    named = [
        ("steps/s", rank.steps_per_second, figure),
        ("step", rank.step_mean_seconds, seconds),
        *((phase, curve, ratio) for phase, curve in rank.phase_ratios.items() if phase in ("data_wait", "comm")),
        ("batches ready", rank.loader_ready, figure),
        *((f"memory {plain(role)}", curve, size) for role, curve in rank.rss_bytes.items()),
        *((f"gpu {plain(kind)}", curve, size) for kind, curve in rank.gpu_bytes.items()),
        *((f"{plain(way)}/s", curve, size) for way, curve in rank.copy_bytes_per_second.items()),
    ]
    for name, curve, told in named:
        if any(curve):
            yield NamedCurve(name, curve, told, cells=_NAME_CELLS, lasts=curve is not rank.loader_ready)


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
    held = {f"rss {role}": size(value) for role, value in rank.memory.rss_bytes.items()}
    held |= {f"gpu {kind}": size(value) for kind, value in rank.memory.gpu_bytes.items()}
    if held:
        yield f"memory: {pairs(held)}"
    if rank.cores_now:
        yield f"cores in use: {pairs({role: figure(used) for role, used in rank.cores_now.items()})}"
    if rank.pauses is not None:
        yield (
            f"pauses: garbage collection {seconds(rank.pauses.gc_seconds)} ({count(rank.pauses.gc_collections)}), "
            f"compiling {seconds(rank.pauses.compile_seconds)} ({count(rank.pauses.compiles)}), own "
            f"collectives {seconds(rank.pauses.comm_blocked_seconds)} ({count(rank.pauses.comm_calls)})"
        )
    if rank.collectives is not None:
        yield (
            f"collectives: number {number(rank.collectives.sequence)}, {number(rank.collectives.completed)} of "
            f"{number(rank.collectives.enqueued)} done; {pairs(rank.collectives.calls)}"
        )
    if rank.cost is not None:
        yield _cost(rank.cost)


def _input(loader: LoaderView) -> str:
    return (
        f"input: {count(loader.batches)} batches, {size(loader.batch_bytes)} in all, waited "
        f"{seconds(loader.wait_seconds)}, of that {seconds(loader.transfer_seconds)} for a batch that was ready and "
        f"{seconds(loader.reorder_blocked_seconds)} for one out of order; workers {number(loader.workers_alive)} of "
        f"{number(loader.workers_configured)}"
    )


def _cost(cost: CostView) -> str:
    told = f"being measured: {seconds(cost.probe_seconds)} in the probe"
    if cost.unobserved_steps:
        told += f"; {count(cost.unobserved_steps)} steps were not observed, for the budget"
    if cost.parts_unavailable:
        told += f"; out of service: {plain(', '.join(cost.parts_unavailable))}"
    return told + (f" ({plain(cost.fault)})" if cost.fault else "")
