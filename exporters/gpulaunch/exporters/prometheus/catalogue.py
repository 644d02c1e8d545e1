"""The catalogue of all metrics: name, type, unit, help and labels. The renderer refuses anything not listed here.

Rules (https://prometheus.io/docs/practices/naming/): base units, `_total` on counters, `_info` for facts to
join on, one quantity and one unit per metric, sums over labels make sense, and every label has a closed set of values,
except an index (of a rank, a GPU) or a description of the run. An unknown value is absent, never zero. No argument,
environment value or path is a label.

Rows of what is measured in ranks come from the declarations in `profiler.channel.quantities`, others are defined in the
package `metrics`, one module per domain; here they are joined in display order.

`docs/metrics.md` is written from this table: python -m gpulaunch.exporters.prometheus.catalogue > docs/metrics.md
"""

from __future__ import annotations

import math
import sys
from typing import Final

from gpulaunch.exporters.prometheus.metrics.communication import COMMUNICATION
from gpulaunch.exporters.prometheus.metrics.copying import COPYING
from gpulaunch.exporters.prometheus.metrics.declared import declared
from gpulaunch.exporters.prometheus.metrics.gpus import GPUS
from gpulaunch.exporters.prometheus.metrics.loading import LOADING
from gpulaunch.exporters.prometheus.metrics.metric import Metric
from gpulaunch.exporters.prometheus.metrics.node import NODE
from gpulaunch.exporters.prometheus.metrics.processes import PROCESSES
from gpulaunch.exporters.prometheus.metrics.profiler import PROFILER
from gpulaunch.exporters.prometheus.metrics.progress import PROGRESS
from gpulaunch.exporters.prometheus.metrics.steps import STEPS
from gpulaunch.profiler.channel.quantities import GpuMemory, Pauses

CATALOGUE: Final[tuple[Metric, ...]] = (
    *STEPS,
    *LOADING,
    *PROCESSES,
    *COPYING,
    *declared(Pauses),
    *COMMUNICATION,
    *declared(GpuMemory),
    *PROGRESS,
    *GPUS,
    *NODE,
    *PROFILER,
)


def _by_size(value: str) -> tuple[float, str]:
    """Sort key of a label value: numbers by size, then text."""
    return (float(value) if value.isdecimal() else math.inf, value)


def markdown() -> str:
    """Return the catalogue as the page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated from `exporters/gpulaunch/exporters/prometheus/catalogue.py`; a test compares the two.",
        "Unknown values are absent, never zero. Counters continue across restarts of the ranks and of the sidecar,",
        "except those of the sidecar itself (`gpulaunch_sidecar_`, `gpulaunch_collector_`).",
        "",
        "| name | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in CATALOGUE:
        labels = ", ".join(
            f"`{label.name}`" + (f" = {' / '.join(sorted(label.values, key=_by_size))}" if label.values else "")
            for label in metric.labels
        )
        lines.append(f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
