"""Metrics of the GPU memory of each rank, as allocated by torch."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.metric import RANK, Kind, Metric, one_of

MEMORY: tuple[Metric, ...] = (
    Metric(
        name="gpulaunch_gpu_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(
            RANK,
            one_of("state", "allocated", "reserved", "peak_allocated", "peak_reserved", "active", "inactive_split"),
        ),
        help="torch's caching allocator on the rank's GPU; absent where the rank uses none.",
    ),
    Metric(
        name="gpulaunch_gpu_alloc_retries_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Times that all cached GPU memory was given back before an allocation succeeded.",
    ),
    Metric(
        name="gpulaunch_gpu_ooms_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Allocations of GPU memory that failed.",
    ),
    Metric(
        name="gpulaunch_pinned_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(RANK,),
        help="Host memory that torch holds pinned.",
    ),
)
