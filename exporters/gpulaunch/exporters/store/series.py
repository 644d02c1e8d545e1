"""A published `NodeState` as plain numbers, by the names and labels of the catalogue: what is kept of it over time.

The names are the catalogue's, so that whoever knows `/metrics` knows the file. Left out is what says nothing as a
curve: facts (`_info`), buckets of histograms (their `_sum` and `_count` stay), states told as text, and what the store
keeps as findings, collectors and moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from gpulaunch.exporters.prometheus.catalogue import CATALOGUE, Kind
from gpulaunch.exporters.prometheus.families import Families
from gpulaunch.exporters.prometheus.rank_values import put_collectives, put_processes, put_training, put_workers
from gpulaunch.exporters.prometheus.values import Facts, families
from gpulaunch.profiler.record import NodeState

__all__ = ["LABELS", "Key", "Sample", "sample_of"]

Key: TypeAlias = tuple[str, ...]
"""The name of a series and the values of its labels, in the catalogue's order."""

_LEFT_OUT: Final = frozenset(
    (
        *("gpulaunch_step_source", "gpulaunch_last_collective", "gpulaunch_last_step_timestamp_seconds"),
        *("gpulaunch_probe_part_shed", "gpulaunch_probe_part_unavailable"),
        *("gpulaunch_finding_active", "gpulaunch_finding_lost_seconds_per_hour"),
        *("gpulaunch_collector_available", "gpulaunch_collector_errors_total", "gpulaunch_collector_seconds_total"),
        *("gpulaunch_sidecar_scrapes_total", "gpulaunch_sidecar_render_duration_seconds"),
    )
)
_COUNTS: Final = {
    metric.name: metric.kind is Kind.COUNTER
    for metric in CATALOGUE
    if metric.kind in (Kind.COUNTER, Kind.GAUGE) and metric.name not in _LEFT_OUT
}
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
_NO_FACTS: Final = Facts(version="")


@dataclass(frozen=True)
class Sample:
    """The numbers of one look."""

    counters: dict[Key, float] = field(default_factory=dict[Key, float])
    """What only grows, but with a new run."""
    gauges: dict[Key, float] = field(default_factory=dict[Key, float])


class _Flat(Families):
    """Takes what the page's rows say and makes no families of it: a tenth of the price, once a second, for ever."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self._sample = sample

    def put(self, name: str, value: float | None, /, **labels: str) -> None:
        if value is not None and (counts := _COUNTS.get(name)) is not None and math.isfinite(value):
            (self._sample.counters if counts else self._sample.gauges)[name, *labels.values()] = value

    def put_histogram(
        self, name: str, bounds: Sequence[float], counts: Sequence[int], total: float, /, **labels: str
    ) -> None:
        del bounds
        self._sample.counters[f"{name}_sum", *labels.values()] = total
        self._sample.counters[f"{name}_count", *labels.values()] = sum(counts)


def sample_of(state: NodeState) -> Sample:
    """Give the numbers of a state."""
    sample = Sample()
    flat = _Flat(sample)
    for training in state.training:
        put_training(flat, training, wall_minus_monotonic_ns=0)
    for processes in state.processes:
        put_processes(flat, processes)
    for workers in state.workers:
        put_workers(flat, workers)
    for collectives in state.collectives:
        put_collectives(flat, collectives)
    # What is of the node goes the long way: it does not grow with the ranks.
    of_node = replace(state, training=(), processes=(), workers=(), collectives=(), findings=(), collectors={})
    for family in families(of_node, _NO_FACTS).collect():
        for each in family.samples:
            flat.put(each.name, each.value, **each.labels)
    return sample
