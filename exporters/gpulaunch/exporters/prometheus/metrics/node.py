"""Metrics of the node, shared by all its ranks."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.metric import Kind, Metric, one_of

NODE: tuple[Metric, ...] = (
    Metric(
        name="gpulaunch_shm_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(one_of("state", "used", "size"),),
        help="Shared memory of the node (/dev/shm), which carries batches from workers to ranks; full: a bus error.",
    ),
    Metric(
        name="gpulaunch_node_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(one_of("state", "total", "available", "page_cache", "swap_used"),),
        help="Memory of the node: all, what programs could still get, what holds files, what is swapped out.",
    ),
    Metric(
        name="gpulaunch_cgroup_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(one_of("state", "limit", "used"),),
        help="What the control group of the job may have, and has; absent without a limit.",
    ),
    Metric(
        name="gpulaunch_cpu_cores",
        kind=Kind.GAUGE,
        labels=(one_of("state", "allowed", "quota"),),
        help="Cores that the job may run on, and its quota where it has one.",
    ),
    Metric(
        name="gpulaunch_node_pressure_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(
            one_of("resource", "cpu", "io", "memory"),
            one_of("severity", "some", "full"),
        ),
        help="Time in which tasks of the node (some, or all) lacked a resource, as the kernel counts it.",
    ),
)
