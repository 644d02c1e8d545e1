"""Metrics of pauses of the training thread."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.metric import RANK, Kind, Metric

PAUSES: tuple[Metric, ...] = (
    Metric(
        name="gpulaunch_gc_collections_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Runs of the garbage collector of Python.",
    ),
    Metric(
        name="gpulaunch_gc_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(RANK,),
        help="Time in them.",
    ),
    Metric(
        name="gpulaunch_compiles_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Compilations by torch.compile, those after the first of a function included.",
    ),
    Metric(
        name="gpulaunch_compile_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(RANK,),
        help="Time in them.",
    ),
)
