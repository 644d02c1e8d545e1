"""Metrics of copies between CPU and GPU, and of synchronization with the GPU."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.declared import declared
from gpulaunch.exporters.prometheus.metrics.metric import GPU, Kind, Metric, one_of
from gpulaunch.profiler.channel.layout import COPIES, SYNCS
from gpulaunch.profiler.channel.quantities import CopyTotals, SyncTotals

_COPY = (
    one_of("direction", *(direction for direction, _ in COPIES)),
    one_of("host_memory", *(host_memory for _, host_memory in COPIES)),
)

COPYING: tuple[Metric, ...] = (
    *declared(CopyTotals, *_COPY),
    Metric(
        name="gpulaunch_copy_coverage_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(GPU, one_of("direction", "h2d", "d2h")),
        help="Bytes of observed copies divided by all bytes transferred over the GPU's PCIe link since profiling"
        " started; far below 1 if there are copies that are not observed.",
    ),
    *declared(SyncTotals, one_of("kind", *SYNCS)),
)
