"""Sections on the GPUs, and on the overhead of the profiler."""

from __future__ import annotations

from typing import Final

from gpulaunch.exporters.report.anatomy import MOST_ROWS
from gpulaunch.exporters.report.document import Block, Chart, Column, Paragraph, Section, Series, Table
from gpulaunch.exporters.report.formatting import amount, moment, percent, seconds, size
from gpulaunch.exporters.report.time_axis import chosen, over_time
from gpulaunch.exporters.view.figures import PROSE, UNKNOWN, count
from gpulaunch.exporters.view.model import RunView
from gpulaunch.exporters.view.rank_model import RankView

_MOST_LINES: Final = 8


def gpus(view: RunView) -> Section:
    """Return the section on GPUs."""
    if not view.devices:
        said = "No GPU was found." if view.watched else "Unknown: the run was not profiled."
        return Section(id="gpus", title="GPUs", blocks=(Paragraph(said),))
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
                _with_unit(value("power_watts"), "W"),
                _with_unit(value("temperature_celsius"), "C"),
                PROSE.hertz(value("clock_hertz")),
                amount(value("energy_joules")),
                count(value("ecc_uncorrected")),
                count(value("xid_errors")),
                throttled or UNKNOWN,
            )
        )
    titles = (
        *("GPU", "Model", "Utilization", "SMs active", "Memory", "Power", "Temperature", "Clock", "Energy (J)"),
        *("ECC, uncorrected", "Xid errors"),
    )
    blocks: list[Block] = [
        Table(
            caption="GPUs (node:index), last sample; energy and errors over the run",
            columns=(*(Column(title, number=index > 1) for index, title in enumerate(titles)), Column("Throttled")),
            rows=tuple(rows),
        )
    ]
    for name, title, unit, factor in (
        ("utilization_ratio", "GPU utilization", "%", 100.0),
        ("sm_active_ratio", "SMs active", "%", 100.0),
        ("memory_used_bytes", "GPU memory used", "GiB", 1 / (1 << 30)),
        ("pcie_receive_bytes_per_second", "PCIe received by the GPU", "MB/s", 1e-6),
        ("pcie_transmit_bytes_per_second", "PCIe sent by the GPU", "MB/s", 1e-6),
        ("power_watts", "GPU power", "W", 1.0),
    ):
        devices = [device for device in view.devices if device.curves.get(name)][:_MOST_LINES]
        blocks += over_time(
            view,
            f"gpu-{name.replace('_', '-')}",
            title,
            unit,
            f"{len(devices)} of {len(view.devices)} GPUs; the table above has the last sample.",
            [
                Series(name=f"GPU {device.node}:{device.gpu}", values=device.curves[name], colour=index)
                for index, device in enumerate(devices)
            ],
            factor=factor,
        )
    return Section(id="gpus", title="GPUs", blocks=tuple(blocks))


def _with_unit(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{amount(value)} {unit}"


def cost(view: RunView) -> Section:
    """Return the section on the profiler's overhead, and on its parts that did not work."""
    blocks: list[Block] = []
    priced = chosen([rank for rank in view.ranks if rank.cost is not None], MOST_ROWS)
    if priced:
        blocks += [
            Paragraph(
                "Probe: its own time within the steps, including its calls, as it measures itself. Above its budget, "
                "it observes only some of the steps."
            ),
            _probe(priced),
        ]
    if view.nodes:
        blocks += [_sidecars(view), *_sidecar_cores(view)]
    if view.collectors:
        blocks.append(_collectors(view))
    said = "None: the run was not profiled." if not view.watched else "Unknown."
    return Section(id="cost", title="Profiler overhead", blocks=tuple(blocks) or (Paragraph(said),))


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
    titles = ("Rank", "Probe time", "Share of steps", "Budget", "Unobserved steps")
    return Table(
        caption="Probe overhead by rank",
        columns=(
            *(Column(title, number=index > 0) for index, title in enumerate(titles)),
            Column("Parts unavailable"),
        ),
        rows=tuple(rows),
    )


def _sidecars(view: RunView) -> Table:
    return Table(
        caption="Sidecars: one process per node, at low priority",
        columns=(
            Column("Node"),
            *(
                Column(title, number=True)
                for title in ("Last sample", "CPU time", "Cores", "Memory", "Samples", "Late samples")
            ),
        ),
        rows=tuple(
            (
                f"{node.node}: {node.host}" if node.host else str(node.node),
                moment(node.seen_s),
                seconds(node.sidecar_cpu_seconds),
                amount(_cores(node.sidecar_cpu_seconds, view.elapsed_seconds)),
                size(node.sidecar_rss_bytes),
                count(node.refreshes),
                count(node.late_refreshes),
            )
            for node in view.nodes[:MOST_ROWS]
        ),
    )


def _sidecar_cores(view: RunView) -> tuple[Chart, ...]:
    nodes = [node for node in view.nodes if node.sidecar_cores][:_MOST_LINES]
    return over_time(
        view,
        "sidecar-cores",
        "Cores used by the sidecar",
        "cores",
        "The table above has the mean.",
        [Series(name=f"node {node.node}", values=node.sidecar_cores, colour=index) for index, node in enumerate(nodes)],
    )


def _cores(cpu_seconds: float | None, elapsed_seconds: float | None) -> float | None:
    return cpu_seconds / elapsed_seconds if cpu_seconds is not None and elapsed_seconds else None


def _collectors(view: RunView) -> Table:
    return Table(
        caption="Collectors of the sidecar",
        columns=(
            Column("Collector"),
            Column("Node", number=True),
            Column("Available"),
            Column("Errors", number=True),
            Column("Time", number=True),
            Column("Reason, or last error"),
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
