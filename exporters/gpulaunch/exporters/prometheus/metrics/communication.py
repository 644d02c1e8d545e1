"""Metrics of communication: collectives, and how long ranks wait for each other."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.metric import RANK, Kind, Metric, one_of
from gpulaunch.profiler.channel.collectives import KINDS

_KIND = one_of("kind", *KINDS)

COMMUNICATION: tuple[Metric, ...] = (
    Metric(
        name="gpulaunch_collective_calls_total",
        kind=Kind.COUNTER,
        labels=(RANK, _KIND),
        help="Collective calls started by the training thread, by kind. Those of DistributedDataParallel start in C++"
        " and are only included in the following metrics.",
    ),
    Metric(
        name="gpulaunch_collectives_enqueued_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Collectives enqueued in all process groups, as numbered by torch's flight recorder; updated at the end"
        " of a step, once per second.",
    ),
    Metric(
        name="gpulaunch_collectives_completed_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Collectives completed in all process groups, as numbered by torch's flight recorder.",
    ),
    Metric(
        name="gpulaunch_collective_sequence",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="Number of the last collective started in the default process group in the current attempt. Updated once"
        " per second, so values of ranks may differ by one second; the other ranks wait for a rank that stays behind.",
    ),
    Metric(
        name="gpulaunch_last_collective",
        kind=Kind.GAUGE,
        labels=(RANK, _KIND, one_of("state", "running", "returned")),
        help="1 for the last call of the training thread, by kind and by whether it has returned.",
    ),
)
