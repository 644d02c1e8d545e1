"""Builds the views of nodes, GPUs, collectors, program lines and findings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from gpulaunch.exporters.view.curves import Curves, total
from gpulaunch.exporters.view.model import CollectorView, DeviceView, FindingView, NodeView
from gpulaunch.exporters.view.rank_model import Curve, SiteView
from gpulaunch.exporters.view.source import NodeSource, part
from gpulaunch.exporters.view.values import Values, by_label, whole

MOST_SITES: Final = 200
_NS_PER_S: Final = 1e9

_NODE_VALUES: Final = {
    "memory_total_bytes": ("node_memory_bytes", "total"),
    "memory_available_bytes": ("node_memory_bytes", "available"),
    "page_cache_bytes": ("node_memory_bytes", "page_cache"),
    "swap_used_bytes": ("node_memory_bytes", "swap_used"),
    "shm_size_bytes": ("shm_bytes", "size"),
    "shm_used_bytes": ("shm_bytes", "used"),
    "cgroup_limit_bytes": ("cgroup_memory_bytes", "limit"),
    "cgroup_used_bytes": ("cgroup_memory_bytes", "used"),
    "cores_allowed": ("cpu_cores", "allowed"),
    "cores_quota": ("cpu_cores", "quota"),
}
_DEVICE_GAUGES: Final = {
    "utilization_ratio": ("gpu_utilization_ratio",),
    "memory_used_bytes": ("gpu_device_memory_bytes", "used"),
    "memory_total_bytes": ("gpu_device_memory_bytes", "total"),
    "clock_hertz": ("gpu_clock_hertz", "sm"),
    "power_watts": ("gpu_power_watts",),
    "temperature_celsius": ("gpu_temperature_celsius", "core"),
    "sm_active_ratio": ("gpu_sm_active_ratio",),
    "sm_occupancy_ratio": ("gpu_sm_occupancy_ratio",),
    "dram_active_ratio": ("gpu_dram_active_ratio",),
}
_DEVICE_COUNTERS: Final = {
    "energy_joules": ("gpu_energy_joules_total",),
    "pcie_receive_bytes": ("gpu_pcie_bytes_total", "receive"),
    "pcie_transmit_bytes": ("gpu_pcie_bytes_total", "transmit"),
    "nvlink_receive_bytes": ("gpu_nvlink_bytes_total", "receive"),
    "nvlink_transmit_bytes": ("gpu_nvlink_bytes_total", "transmit"),
    "pcie_replays": ("gpu_pcie_replays_total",),
    "ecc_corrected": ("gpu_ecc_errors_total", "corrected"),
    "ecc_uncorrected": ("gpu_ecc_errors_total", "uncorrected"),
}
_DEVICE_LEVELS: Final = (
    "utilization_ratio",
    "memory_used_bytes",
    "power_watts",
    "temperature_celsius",
    "sm_active_ratio",
)


def node_of(source: NodeSource, curves: Curves) -> NodeView:
    """Return the node itself, and its sidecar."""
    counters, gauges = Values(source.counters), Values(source.gauges)
    known = {what: gauges.get(*name) for what, name in _NODE_VALUES.items()}
    pressure = curves.growth("gpulaunch_node_pressure_seconds_total", "cpu", "some")
    used = total([curves.growth(*key) for key in source.counters if key[0] == "gpulaunch_process_cpu_seconds_total"])
    sidecar = curves.growth("gpulaunch_profiler_overhead_seconds_total", "", "sidecar")
    return NodeView(
        node=source.node,
        host=source.run.host if source.run is not None else "",
        seen_s=source.seen_s,
        values={what: value for what, value in known.items() if value is not None},
        pressure_seconds={"_".join(labels): seconds for labels, seconds in counters.by("node_pressure_seconds_total")},
        sidecar_cpu_seconds=counters.get("profiler_overhead_seconds_total", "", "sidecar"),
        sidecar_rss_bytes=gauges.whole("sidecar_memory_bytes"),
        refreshes=counters.whole("sidecar_refreshes_total"),
        late_refreshes=counters.whole("sidecar_late_refreshes_total"),
        memory_available_bytes=curves.level("gpulaunch_node_memory_bytes", "available"),
        shm_used_bytes=curves.level("gpulaunch_shm_bytes", "used"),
        cpu_pressure_ratio=() if pressure is None else pressure.per_second(),
        cores_used=() if used is None else used.per_second(),
        sidecar_cores=() if sidecar is None else sidecar.per_second(),
    )


def devices_of(source: NodeSource, curves: Curves) -> list[DeviceView]:
    """Return the GPUs of the node."""
    told = part(source.document, "devices")
    counters, gauges = by_label(source.counters), by_label(source.gauges)
    views: list[DeviceView] = []
    for gpu, device in told.items():
        named = cast("Mapping[str, Any]", device) if isinstance(device, dict) else {}
        grown, now = Values(counters.get(gpu, {}), gpu), Values(gauges.get(gpu, {}), gpu)
        known = {what: now.get(*name) for what, name in _DEVICE_GAUGES.items()}
        known |= {what: grown.get(*name) for what, name in _DEVICE_COUNTERS.items()}
        xids = [count for _, count in grown.by("gpu_xid_errors_total")]
        known["xid_errors"] = sum(xids) if xids else None
        views.append(
            DeviceView(
                gpu=gpu,
                node=source.node,
                uuid=str(named.get("uuid", "")),
                model=str(named.get("model", "")),
                values={what: value for what, value in known.items() if value is not None},
                throttle_seconds=grown.one("gpu_throttle_seconds_total"),
                curves=_device_curves(curves, gpu),
            )
        )
    return views


def collectors_of(source: NodeSource) -> list[CollectorView]:
    """Return the condition of the sidecar's collectors."""
    views: list[CollectorView] = []
    for name, told in part(source.document, "collectors").items():
        condition = cast("Mapping[str, Any]", told) if isinstance(told, dict) else {}
        errors, spent_s = condition.get("errors"), condition.get("spent_s")
        views.append(
            CollectorView(
                name=name,
                available=condition.get("available") is True,
                reason=str(condition.get("reason", "")),
                errors=whole(errors) or 0,
                spent_seconds=float(spent_s) if isinstance(spent_s, (int, float)) else 0.0,
                node=source.node,
            )
        )
    return views


def sites_of(sources: Iterable[NodeSource]) -> tuple[SiteView, ...]:
    """Return program lines, merged over all ranks, the most expensive first."""
    found: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
    for source in sources:
        for label, told in part(source.document, "ranks").items():
            rows = cast("Mapping[str, Any]", told).get("sites") if isinstance(told, dict) else None
            for row in rows if isinstance(rows, list) else []:
                match row:
                    case [str(kind), str(text), *numbers] if len(numbers) == 6 and label.isdecimal():
                        if any(not isinstance(number, int) for number in numbers):
                            continue
                        sums, ranks = found.setdefault((kind, text), ([0] * 6, []))
                        sums[:] = [one + other for one, other in zip(sums, cast("list[int]", numbers), strict=True)]
                        ranks.append(int(label))
                    case _:
                        pass
    views = [
        SiteView(
            kind=kind,
            text=text,
            ranks=tuple(sorted(ranks)),
            count=sums[0],
            size_bytes=sums[1],
            blocked_seconds=sums[2] / _NS_PER_S,
            gpu_seconds=sums[3] / _NS_PER_S,
            pinned=sums[4],
            non_blocking=sums[5],
        )
        for (kind, text), (sums, ranks) in found.items()
    ]
    views.sort(key=lambda site: (-site.blocked_seconds - site.gpu_seconds, -site.size_bytes, -site.count, site.text))
    return tuple(views[:MOST_SITES])


def finding_of(
    told: Mapping[str, Any],
    *,
    node: int,
    active: bool,
    first_seen_s: float,
    last_seen_s: float,
    lost_seconds: float | None,
) -> FindingView:
    """Return a finding from `record.Finding.as_json`; parts may be missing."""

    def number(name: str) -> float:
        value = told.get(name)
        return float(value) if isinstance(value, (int, float)) and abs(value) < 1e15 else 0.0

    line, file, ranks, evidence = (told.get(name) for name in ("line", "file", "ranks", "evidence"))
    return FindingView(
        rule=str(told.get("rule", "")),
        file=file if isinstance(file, str) else None,
        line=whole(line),
        subject=str(told.get("subject", "")),
        ranks=tuple(
            each for each in cast("Sequence[object]", ranks) if isinstance(each, int) and not isinstance(each, bool)
        )
        if isinstance(ranks, list)
        else (),
        seconds_per_step=number("seconds_per_step"),
        seconds_per_hour=number("seconds_per_hour"),
        lost_seconds=lost_seconds,
        confidence=number("confidence"),
        evidence={
            str(name): value
            for name, value in cast("Mapping[str, object]", evidence).items()
            if isinstance(value, (str, int, float))
        }
        if isinstance(evidence, dict)
        else {},
        advice=str(told.get("advice", "")),
        active=active,
        first_seen_s=first_seen_s,
        last_seen_s=last_seen_s,
        node=node,
    )


def _device_curves(curves: Curves, gpu: str) -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    for what in _DEVICE_LEVELS:
        name, *labels = _DEVICE_GAUGES[what]
        found[what] = curves.level(f"gpulaunch_{name}", gpu, *labels)
    for direction in ("receive", "transmit"):
        growth = curves.growth("gpulaunch_gpu_pcie_bytes_total", gpu, direction)
        found[f"pcie_{direction}_bytes_per_second"] = () if growth is None else growth.per_second()
    return {what: curve for what, curve in found.items() if curve}
