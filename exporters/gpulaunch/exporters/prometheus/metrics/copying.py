"""Metrics of copies between CPU and GPU, and of waits for the GPU."""

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
        help="What copies of the program's moved, of all that crossed the GPU's PCIe link since the profiler looks at "
        "it: far below 1, and something copies that is not seen.",
    ),
    *declared(SyncTotals, one_of("kind", *SYNCS)),
)
