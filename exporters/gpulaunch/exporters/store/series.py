"""Converts a published `NodeState` into the series that are stored, named as in the metric catalogue.

The names are the catalogue's, so the file has the same series as `/metrics`. Left out is what is useless as a time
series: facts (`_info`), histogram buckets (`_sum` and `_count` stay), text states, and what the store keeps as
findings, collectors and timestamps. Samples with an unknown label value are left out too: one new throttle reason must
not cost all other samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from gpulaunch.exporters.prometheus.catalogue import CATALOGUE
from gpulaunch.exporters.prometheus.metrics.metric import Kind
from gpulaunch.exporters.prometheus.values import Facts, put_state
from gpulaunch.profiler.record import NodeState

Key: TypeAlias = tuple[str, ...]
"""The name of a series and the values of its labels, in the catalogue's order."""

_LEFT_OUT: Final = frozenset(
    (
        *("gpulaunch_step_source", "gpulaunch_last_collective", "gpulaunch_last_step_timestamp_seconds"),
        "gpulaunch_probe_part_unavailable",
        *("gpulaunch_finding_active", "gpulaunch_finding_lost_ratio"),
        *("gpulaunch_collector_available", "gpulaunch_collector_errors_total", "gpulaunch_collector_seconds_total"),
        *("gpulaunch_sidecar_scrapes_total", "gpulaunch_sidecar_render_duration_seconds"),
    )
)
_KEPT: Final = {
    metric.name: (
        metric.kind is Kind.COUNTER,
        tuple((label.name, label.values) for label in metric.labels if label.values is not None),
    )
    for metric in CATALOGUE
    if metric.kind in (Kind.COUNTER, Kind.GAUGE) and metric.name not in _LEFT_OUT
}
"""Whether it is a counter, and its closed labels."""
LABELS: Final = {
    **{metric.name: tuple(label.name for label in metric.labels) for metric in CATALOGUE},
    **{
        metric.name + suffix: tuple(label.name for label in metric.labels)
        for metric in CATALOGUE
        if metric.kind is Kind.HISTOGRAM
        for suffix in ("_sum", "_count")
    },
}
"""The names of the labels of every series."""
NUMBERS: Final = frozenset(("gpulaunch_collective_sequence", "gpulaunch_checkpoint_step", "gpulaunch_resumed_step"))
"""Gauges that need every digit, however large: stored like counters (`frame`)."""
_NO_FACTS: Final = Facts(version="")


@dataclass(frozen=True)
class Sample:
    """The values of one refresh."""

    counters: dict[Key, float] = field(default_factory=dict[Key, float])
    """Values that only grow within a run."""
    gauges: dict[Key, float] = field(default_factory=dict[Key, float])

    def put(self, name: str, value: float | None, /, **labels: str) -> None:
        """Add a value of a state, if it is stored."""
        kept = _KEPT.get(name)
        if kept is None or value is None or not math.isfinite(value):
            return
        counts, closed = kept
        for label, values in closed:
            if labels[label] not in values:
                return
        (self.counters if counts else self.gauges)[name, *labels.values()] = value

    def put_histogram(
        self, name: str, bounds: Sequence[float], counts: Sequence[int], total: float, /, **labels: str
    ) -> None:
        """Add the sum and count of a histogram."""
        del bounds
        self.counters[f"{name}_sum", *labels.values()] = total
        self.counters[f"{name}_count", *labels.values()] = sum(counts)


def sample_of(state: NodeState) -> Sample:
    """Return the values of a state."""
    sample = Sample()
    put_state(sample, state, _NO_FACTS)
    return sample
