"""Metrics of the node, shared by all its ranks."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.metric import Kind, Metric, one_of

NODE: tuple[Metric, ...] = (
    Metric(
        name="gpulaunch_shm_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(one_of("state", "used", "size"),),
        help="Shared memory of the node (/dev/shm), used to pass batches from workers to ranks; when it is full,"
        " processes are killed by SIGBUS.",
    ),
    Metric(
        name="gpulaunch_node_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(one_of("state", "total", "available", "page_cache", "swap_used"),),
        help="Memory of the node: total, available to programs, used by the page cache, and swapped out.",
    ),
    Metric(
        name="gpulaunch_cgroup_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(one_of("state", "limit", "used"),),
        help="Memory limit and usage of the job's control group; absent without a limit.",
    ),
    Metric(
        name="gpulaunch_cpu_cores",
        kind=Kind.GAUGE,
        labels=(one_of("state", "allowed", "quota"),),
        help="Cores in the job's affinity mask, and its CPU quota if there is one.",
    ),
    Metric(
        name="gpulaunch_node_pressure_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(
            one_of("resource", "cpu", "io", "memory"),
            one_of("severity", "some", "full"),
        ),
        help="Time in which some or all tasks of the node waited for a resource (pressure stall information).",
    ),
)
