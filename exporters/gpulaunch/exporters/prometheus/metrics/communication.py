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
        help="Collective calls that the training thread began, by kind. DistributedDataParallel begins its own in C++:"
        " those are in the next ones only.",
    ),
    Metric(
        name="gpulaunch_collectives_enqueued_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Collectives that were begun in all process groups, as torch's flight recorder numbers them: at the end of"
        " a step, once a second.",
    ),
    Metric(
        name="gpulaunch_collectives_completed_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Those that were completed.",
    ),
    Metric(
        name="gpulaunch_collective_sequence",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="Number of the last collective that was begun in the default process group, in the running attempt. It is"
        " told once a second, so ranks differ by a second's worth; one that stays behind is waited for.",
    ),
    Metric(
        name="gpulaunch_last_collective",
        kind=Kind.GAUGE,
        labels=(RANK, _KIND, one_of("state", "running", "returned")),
        help="1 for the call that the training thread made last, and whether it is inside of it still.",
    ),
)
