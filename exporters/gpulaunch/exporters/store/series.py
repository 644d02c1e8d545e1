"""A published `NodeState` as plain numbers, by the names and labels of the catalogue: what is kept of it over time.

The names are the catalogue's, so that whoever knows `/metrics` knows the file. Left out is what says nothing as a
curve: facts (`_info`), buckets of histograms (their `_sum` and `_count` stay), states told as text, and what the store
keeps as findings, collectors and moments. So is what has a label that the catalogue does not know: one reason for a
slow clock that is new to us must not cost all the others.
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
        *("gpulaunch_probe_part_shed", "gpulaunch_probe_part_unavailable"),
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
"""Whether it counts, and its closed labels."""
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
"""Gauges of which every digit counts, however large they are: they are kept as counters are (`frame`)."""
_NO_FACTS: Final = Facts(version="")


@dataclass(frozen=True)
class Sample:
    """The numbers of one look."""

    counters: dict[Key, float] = field(default_factory=dict[Key, float])
    """What only grows, but with a new run."""
    gauges: dict[Key, float] = field(default_factory=dict[Key, float])

    def put(self, name: str, value: float | None, /, **labels: str) -> None:
        """Take a value of a state, if it is one to be kept."""
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
        """Take a histogram."""
        del bounds
        self.counters[f"{name}_sum", *labels.values()] = total
        self.counters[f"{name}_count", *labels.values()] = sum(counts)


def sample_of(state: NodeState) -> Sample:
    """Give the numbers of a state."""
    sample = Sample()
    put_state(sample, state, _NO_FACTS)
    return sample
