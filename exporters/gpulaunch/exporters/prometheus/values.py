"""Converts a published `NodeState` into metric families. Pure: state in, families out."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any, cast

from gpulaunch.exporters.prometheus.families import Families, Sink
from gpulaunch.exporters.prometheus.rank_values import put_collectives, put_processes, put_training, put_workers
from gpulaunch.profiler.record import GpuHealth, GpuState, HostState, NodeState, bare_uuid
from gpulaunch.profiler.xid import XIDS

_NS_PER_S = 1e9


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the page reports about the endpoint itself."""

    version: str
    python: str = platform.python_version()
    scrapes: int = 0
    render_s: float | None = None


def families(state: NodeState, facts: Facts) -> Families:
    """Return every metric of a state that is in the catalogue."""
    out = Families(refuse=False)
    put_state(out, state, facts)
    return out


def put_state(out: Sink, state: NodeState, facts: Facts) -> None:
    """Put every value of a state."""
    out.put("gpulaunch_build_info", 1, version=facts.version, python=facts.python)
    if (group := state.group) is not None:
        out.put(
            "gpulaunch_run_info",
            1,
            run=group.run_id,
            name=group.name,
            world_size=str(group.world_size),
            node_rank=str(group.node_rank),
        )
        out.put("gpulaunch_attempt", group.attempt)
        for place in group.ranks:
            out.put(
                "gpulaunch_rank_info", 1, rank=str(place.rank), local_rank=str(place.local_rank), pid=str(place.pid)
            )
    for training in state.training:
        put_training(out, training, wall_minus_monotonic_ns=state.taken_wall_ns - state.taken_monotonic_ns)
    for processes in state.processes:
        put_processes(out, processes)
    for workers in state.workers:
        put_workers(out, workers)
    for collectives in state.collectives:
        put_collectives(out, collectives)
    _put_run(out, state)
    _put_node(out, state)
    for device in state.devices:
        _put_device(out, device)
    _put_coverage(out, state)
    _put_findings(out, state)
    out.put("gpulaunch_sidecar_scrapes_total", facts.scrapes)
    out.put("gpulaunch_sidecar_render_duration_seconds", facts.render_s)


def _put_run(out: Sink, state: NodeState) -> None:
    checkpoints = [training.checkpoint for training in state.training if training.checkpoint is not None]
    captured_ns = [checkpoint.captured_ns for checkpoint in checkpoints if checkpoint.saves]
    if captured_ns:
        age_ns = max(0, state.taken_monotonic_ns - max(captured_ns))  # may have been captured since the refresh began
        out.put("gpulaunch_checkpoint_age_seconds", age_ns / _NS_PER_S)
    if (run := state.run) is None:
        return
    for bucket, goodput_ns in run.goodput_ns.items():
        out.put("gpulaunch_goodput_seconds_total", goodput_ns / _NS_PER_S, bucket=bucket)
    for kind, count in run.restarts.items():
        out.put("gpulaunch_restarts_total", count, kind=kind)
    out.put("gpulaunch_hang_suspicions_total", run.hang_suspicions)
    out.put("gpulaunch_hangs_total", run.hangs)
    for rank, since_ns in run.stalled_since_ns.items():
        stalled_s = max(0, state.taken_monotonic_ns - since_ns) / _NS_PER_S
        out.put("gpulaunch_rank_stalled_seconds", stalled_s, rank=str(rank))
    out.put("gpulaunch_preempted", run.preempted)


def _put_node(out: Sink, state: NodeState) -> None:
    for gpu in state.gpus:
        _put_xids(out, gpu)
        out.put("gpulaunch_gpu_ecc_errors_total", gpu.ecc_uncorrected, gpu=str(gpu.index), severity="uncorrected")
    if state.host is not None:
        _put_host(out, state.host)
    for collector, condition in state.collectors.items():
        out.put("gpulaunch_collector_available", condition.available, collector=collector.value)
        out.put("gpulaunch_collector_errors_total", condition.errors, collector=collector.value)
        out.put("gpulaunch_collector_seconds_total", condition.spent_s, collector=collector.value)
    sidecar = state.sidecar
    out.put("gpulaunch_profiler_overhead_seconds_total", sidecar.cpu_s, rank="", where="sidecar")
    out.put("gpulaunch_sidecar_memory_bytes", sidecar.rss_bytes)
    out.put("gpulaunch_sidecar_refreshes_total", sidecar.refreshes)
    out.put("gpulaunch_sidecar_late_refreshes_total", sidecar.late_refreshes)
    out.put("gpulaunch_sidecar_refresh_duration_seconds", sidecar.refresh_s)


def _put_xids(out: Sink, gpu: GpuHealth) -> None:
    strange = 0
    for xid, count in gpu.xids.items():
        if xid in XIDS:
            out.put("gpulaunch_gpu_xid_errors_total", count, gpu=str(gpu.index), xid=str(xid))
        else:
            strange += count
    out.put("gpulaunch_gpu_xid_errors_total", strange or None, gpu=str(gpu.index), xid="other")


def _put_host(out: Sink, host: HostState) -> None:
    out.put("gpulaunch_shm_bytes", host.shm_used_bytes, state="used")
    out.put("gpulaunch_shm_bytes", host.shm_size_bytes, state="size")
    out.put("gpulaunch_node_memory_bytes", host.memory_total_bytes, state="total")
    out.put("gpulaunch_node_memory_bytes", host.memory_available_bytes, state="available")
    out.put("gpulaunch_node_memory_bytes", host.page_cache_bytes, state="page_cache")
    out.put("gpulaunch_node_memory_bytes", host.swap_used_bytes, state="swap_used")
    out.put("gpulaunch_cgroup_memory_bytes", host.cgroup_limit_bytes, state="limit")
    out.put("gpulaunch_cgroup_memory_bytes", host.cgroup_used_bytes, state="used")
    out.put("gpulaunch_cpu_cores", host.cores, state="allowed")
    out.put("gpulaunch_cpu_cores", host.cpu_quota_cores, state="quota")
    for (resource, severity), lost_s in host.pressure_s.items():
        out.put("gpulaunch_node_pressure_seconds_total", lost_s, resource=resource, severity=severity)


def _put_device(out: Sink, device: GpuState) -> None:
    gpu = device.label
    out.put("gpulaunch_gpu_info", 1, gpu=gpu, uuid=device.uuid, parent=device.parent_uuid or "", model=device.model)
    out.put("gpulaunch_gpu_utilization_ratio", device.utilization_ratio, gpu=gpu)
    out.put("gpulaunch_gpu_device_memory_bytes", device.memory_used_bytes, gpu=gpu, state="used")
    out.put("gpulaunch_gpu_device_memory_bytes", device.memory_total_bytes, gpu=gpu, state="total")
    out.put("gpulaunch_gpu_clock_hertz", device.sm_clock_hertz, gpu=gpu, domain="sm")
    out.put("gpulaunch_gpu_power_watts", device.power_watts, gpu=gpu)
    out.put("gpulaunch_gpu_energy_joules_total", device.energy_joules, gpu=gpu)
    out.put("gpulaunch_gpu_temperature_celsius", device.temperature_celsius, gpu=gpu, sensor="core")
    for reason, throttled_s in device.throttle_seconds.items():
        out.put("gpulaunch_gpu_throttle_seconds_total", throttled_s, gpu=gpu, reason=reason)
    for direction, moved_bytes in device.pcie_bytes.items():
        out.put("gpulaunch_gpu_pcie_bytes_total", moved_bytes, gpu=gpu, direction=direction)
    for direction, moved_bytes in device.nvlink_bytes.items():
        out.put("gpulaunch_gpu_nvlink_bytes_total", moved_bytes, gpu=gpu, direction=direction)
    out.put("gpulaunch_gpu_pcie_link_generation", device.pcie_generation, gpu=gpu, state="now")
    out.put("gpulaunch_gpu_pcie_link_generation", device.pcie_generation_max, gpu=gpu, state="max")
    out.put("gpulaunch_gpu_pcie_link_width", device.pcie_width, gpu=gpu, state="now")
    out.put("gpulaunch_gpu_pcie_link_width", device.pcie_width_max, gpu=gpu, state="max")
    out.put("gpulaunch_gpu_pcie_replays_total", device.pcie_replays, gpu=gpu)
    # "uncorrected" comes from GpuHealth
    out.put("gpulaunch_gpu_ecc_errors_total", device.ecc_errors.get("corrected"), gpu=gpu, severity="corrected")
    for kind, rows in device.remapped_rows.items():
        out.put("gpulaunch_gpu_row_remaps_total", rows, gpu=gpu, kind=kind)
    out.put("gpulaunch_gpu_row_remap_pending", device.remap_pending, gpu=gpu)
    out.put("gpulaunch_gpu_row_remap_failed", device.remap_failed, gpu=gpu)
    ratios = dict(device.gpm_ratios)
    for name in ("sm_active", "sm_occupancy", "dram_active"):
        out.put(f"gpulaunch_gpu_{name}_ratio", ratios.pop(name, None), gpu=gpu)
    for name, ratio in ratios.items():
        out.put("gpulaunch_gpu_pipe_active_ratio", ratio, gpu=gpu, pipe=name.removesuffix("_active"))


def _put_coverage(out: Sink, state: NodeState) -> None:
    """Put the share of GPU link traffic that is accounted for by copies the ranks have counted."""
    cards = {bare_uuid(device.uuid): device.parent_uuid or device.uuid for device in state.devices}
    copied: dict[tuple[str, str], int] = {}
    for training in state.training:
        said: Any = training.facts.get("device")
        uuid = cast("dict[str, Any]", said).get("uuid") if isinstance(said, dict) else None
        card = cards.get(bare_uuid(uuid)) if isinstance(uuid, str) else None
        if card is not None:  # a link belongs to its card, whichever MIG instance copies over it
            for (direction, _), copies in training.copies.items():
                copied[card, direction] = copied.get((card, direction), 0) + copies.size_bytes
    for device in state.devices:
        for direction, link in (("h2d", "receive"), ("d2h", "transmit")):
            crossed = device.pcie_bytes.get(link)
            if crossed and (device.uuid, direction) in copied:
                ratio = copied[device.uuid, direction] / crossed
                out.put("gpulaunch_copy_coverage_ratio", ratio, gpu=device.label, direction=direction)


def _put_findings(out: Sink, state: NodeState) -> None:
    if state.stacks is not None:
        for phase, samples in state.stacks.samples.items():
            out.put("gpulaunch_stack_samples_total", samples, phase=phase)
    lost_ratio: dict[str, float] = {}
    for finding in state.findings:
        lost_ratio[finding.rule] = max(lost_ratio.get(finding.rule, 0.0), finding.seconds_per_hour / 3600)
    for rule, ratio in lost_ratio.items():
        out.put("gpulaunch_finding_active", 1, rule=rule)
        out.put("gpulaunch_finding_lost_ratio", ratio, rule=rule)
