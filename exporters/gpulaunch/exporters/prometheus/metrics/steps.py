"""Metrics of the run, its ranks and their steps."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.declared import declared
from gpulaunch.exporters.prometheus.metrics.metric import RANK, Kind, Label, Metric, one_of
from gpulaunch.profiler.channel.quantities import GpuTime, StepTotals

STEPS: tuple[Metric, ...] = (
    Metric(
        name="gpulaunch_build_info",
        kind=Kind.INFO,
        labels=(Label(name="version"), Label(name="python")),
        help="The version of gpulaunch, and of the Python that runs the sidecar.",
    ),
    Metric(
        name="gpulaunch_run_info",
        kind=Kind.INFO,
        labels=(Label(name="run"), Label(name="name"), Label(name="world_size"), Label(name="node_rank")),
        help="The run: its unique id, its name, its total number of ranks, and the number of this node.",
    ),
    Metric(
        name="gpulaunch_attempt",
        kind=Kind.GAUGE,
        help="The current attempt, counted from 0; it increases with every restart of the ranks.",
    ),
    Metric(
        name="gpulaunch_rank_info",
        kind=Kind.INFO,
        labels=(RANK, Label(name="local_rank"), Label(name="pid")),
        help="A rank of this node and its process; join on rank to get the pid.",
    ),
    Metric(
        name="gpulaunch_probe_armed",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="1 if the probe is active in this rank; it stays 0 in a program that never imports torch.",
    ),
    *declared(StepTotals),
    Metric(
        name="gpulaunch_step_source",
        kind=Kind.GAUGE,
        labels=(RANK, one_of("source", "optimizer", "backward", "dataloader", "mark")),
        help="1 for the event that ends a step in this rank.",
    ),
    *declared(GpuTime),
    Metric(
        name="gpulaunch_last_step_timestamp_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        labels=(RANK,),
        help="Unix time at which the last step ended.",
    ),
)
