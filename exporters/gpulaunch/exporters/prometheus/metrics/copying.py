"""Metrics of copies between CPU and GPU, and of waits for the GPU."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.metric import GPU, RANK, Kind, Metric, one_of
from gpulaunch.profiler.channel.layout import COPIES, SYNCS

_COPY = (
    one_of("direction", *(direction for direction, _ in COPIES)),
    one_of("host_memory", *(host_memory for _, host_memory in COPIES)),
)

COPYING: tuple[Metric, ...] = (
    Metric(
        name="gpulaunch_copies_total",
        kind=Kind.COUNTER,
        labels=(
            RANK,
            *_COPY,
        ),
        help="Copies between CPU and GPU, as the program asked for them.",
    ),
    Metric(
        name="gpulaunch_copy_bytes_total",
        kind=Kind.COUNTER,
        unit="bytes",
        labels=(
            RANK,
            *_COPY,
        ),
        help="What they moved.",
    ),
    Metric(
        name="gpulaunch_copy_blocked_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(
            RANK,
            *_COPY,
        ),
        help="How long the program stood still for them.",
    ),
    Metric(
        name="gpulaunch_copy_gpu_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(
            RANK,
            *_COPY,
        ),
        help="How long the GPU was copying: copies of one step of 16 are timed, and stand for the others.",
    ),
    Metric(
        name="gpulaunch_copy_coverage_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(GPU, one_of("direction", "h2d", "d2h")),
        help="What copies of the program's moved, of all that crossed the GPU's PCIe link since the profiler looks at "
        "it: far below 1, and something copies that is not seen.",
    ),
    Metric(
        name="gpulaunch_sync_calls_total",
        kind=Kind.COUNTER,
        labels=(
            RANK,
            one_of("kind", *SYNCS),
        ),
        help="Calls that made the program wait for the GPU.",
    ),
    Metric(
        name="gpulaunch_sync_blocked_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(
            RANK,
            one_of("kind", *SYNCS),
        ),
        help="How long it waited in them.",
    ),
)
