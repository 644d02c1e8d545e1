"""Report sections on the GPUs, and on the overhead of the profiler."""

from __future__ import annotations

from typing import Final

from gpulaunch.exporters.report.anatomy import MOST_ROWS
from gpulaunch.exporters.report.document import Block, Chart, Column, Paragraph, Section, Series, Table
from gpulaunch.exporters.report.formatting import amount, percent, seconds, size
from gpulaunch.exporters.report.time_axis import chosen, clock_of
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import RankView, RunView

_MOST_LINES: Final = 8


def gpus(view: RunView) -> Section | None:
    """Return the section on GPUs; None if there are none."""
    if not view.devices:
        return None
    rows: list[tuple[str, ...]] = []
    for device in view.devices[:MOST_ROWS]:
        value = device.values.get
        throttled = ", ".join(f"{reason} {seconds(length)}" for reason, length in device.throttle_seconds.items())
        rows.append(
            (
                f"{device.node}:{device.gpu}",
                device.model or UNKNOWN,
                percent(value("utilization_ratio")),
                percent(value("sm_active_ratio")),
                f"{size(value('memory_used_bytes'))} of {size(value('memory_total_bytes'))}",
                f"{amount(value('power_watts'))} W",
                f"{amount(value('temperature_celsius'))} C",
                amount(value("energy_joules")),
                count(value("xid_errors")),
                throttled or UNKNOWN,
            )
        )
    titles = ("GPU", "Model", "Busy", "SMs active", "Memory", "Power", "Temperature", "Energy (J)", "Xid errors")
    blocks: list[Block] = [
        Table(
            caption="GPUs (node:number) when they were seen last; energy and errors of the run",
            columns=(*(Column(title, number=index > 1) for index, title in enumerate(titles)), Column("Slowed down")),
            rows=tuple(rows),
        )
    ]
    clock = clock_of(view)
    for name, title, unit, factor in (
        ("utilization_ratio", "GPU busy", "%", 100.0),
        ("pcie_receive_bytes_per_second", "PCIe to the GPU", "MB/s", 1e-6),
        ("power_watts", "GPU power", "W", 1.0),
    ):
        devices = [device for device in view.devices if device.curves.get(name)][:_MOST_LINES]
        if not devices:
            continue
        blocks.append(
            Chart(
                id=f"gpu-{name.replace('_', '-')}",
                title=f"{title} over time",
                kind="lines",
                unit=unit,
                summary=f"Of {len(devices)} GPUs; the table above has what was seen last.",
                times=clock.times,
                time_unit=clock.unit,
                series=tuple(
                    Series(
                        name=f"GPU {device.node}:{device.gpu}",
                        values=tuple(None if value is None else factor * value for value in device.curves[name]),
                        colour=index,
                    )
                    for index, device in enumerate(devices)
                ),
            )
        )
    return Section(id="gpus", title="GPUs", blocks=tuple(blocks))


def cost(view: RunView) -> Section:
    """Return the section on the profiler's overhead, and on its parts that did not work."""
    blocks: list[Block] = []
    priced = chosen([rank for rank in view.ranks if rank.cost is not None], MOST_ROWS)
    if priced:
        blocks += [
            Paragraph(
                "In the probe: time that it took of the steps, as it measures itself, its calls included. Past its "
                "budget not all steps are observed."
            ),
            _probe(priced),
        ]
    if view.nodes:
        blocks.append(_sidecars(view))
    if view.collectors:
        blocks.append(_collectors(view))
    said = "Nobody measured, so it cost nothing." if not view.watched else "It is not known what being measured cost."
    return Section(id="cost", title="What the profiler cost", blocks=tuple(blocks) or (Paragraph(said),))


def _probe(ranks: list[RankView]) -> Table:
    rows: list[tuple[str, ...]] = []
    for rank in ranks:
        own = rank.cost
        assert own is not None, "only ranks that have one"
        rows.append(
            (
                str(rank.rank),
                seconds(own.probe_seconds),
                percent(own.probe_seconds / rank.step_seconds if rank.step_seconds else None),
                percent(own.budget_ratio) if own.budget_ratio is not None else "no limit",
                count(own.unobserved_steps),
                ", ".join(own.parts_unavailable) + (f" ({own.fault})" if own.fault else "") or UNKNOWN,
            )
        )
    titles = ("Rank", "In the probe", "of the steps", "Budget", "Steps not observed")
    return Table(
        caption="What the probe cost each rank",
        columns=(
            *(Column(title, number=index > 0) for index, title in enumerate(titles)),
            Column("Out of service"),
        ),
        rows=tuple(rows),
    )


def _sidecars(view: RunView) -> Table:
    return Table(
        caption="The sidecar of each node: one process beside the ranks, at low priority",
        columns=(
            Column("Node"),
            *(Column(title, number=True) for title in ("CPU time", "Cores", "Memory", "Looks", "Late")),
        ),
        rows=tuple(
            (
                f"{node.node}: {node.host}" if node.host else str(node.node),
                seconds(node.sidecar_cpu_seconds),
                amount(_cores(node.sidecar_cpu_seconds, view.elapsed_seconds)),
                size(node.sidecar_rss_bytes),
                count(node.refreshes),
                count(node.late_refreshes),
            )
            for node in view.nodes[:MOST_ROWS]
        ),
    )


def _cores(cpu_seconds: float | None, elapsed_seconds: float | None) -> float | None:
    return cpu_seconds / elapsed_seconds if cpu_seconds is not None and elapsed_seconds else None


def _collectors(view: RunView) -> Table:
    return Table(
        caption="What the sidecar collects, and what it could not",
        columns=(
            Column("Collector"),
            Column("Node", number=True),
            Column("Works"),
            Column("Errors", number=True),
            Column("Time", number=True),
            Column("Why not, or the last trouble"),
        ),
        rows=tuple(
            (
                each.name,
                str(each.node),
                "yes" if each.available else "no",
                count(each.errors),
                seconds(each.spent_seconds),
                each.reason or UNKNOWN,
            )
            for each in view.collectors[: 2 * MOST_ROWS]
        ),
    )
