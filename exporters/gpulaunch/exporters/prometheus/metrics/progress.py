"""Metrics of checkpoints, restarts and goodput."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.declared import declared
from gpulaunch.exporters.prometheus.metrics.metric import RANK, Kind, Metric, one_of
from gpulaunch.profiler.channel.quantities import CheckpointState
from gpulaunch.profiler.record import GOODPUT_BUCKETS, RESTART_KINDS

PROGRESS: tuple[Metric, ...] = (
    *declared(CheckpointState),
    Metric(
        name="gpulaunch_checkpoint_age_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="Time since the capture of the state in the newest checkpoint of this node's ranks: the work that a"
        " failure would lose.",
    ),
    Metric(
        name="gpulaunch_goodput_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(one_of("bucket", *GOODPUT_BUCKETS),),
        help="Time of the run by bucket, as observed by the agent on this node; every second is in one bucket."
        " checkpoint_stall is that of the rank that was blocked longest by saves of any library. Steps that have to be"
        " repeated are lost_work, and productive does not increase until they have been repeated. If it is unknown what"
        " an attempt resumed from, its repeated steps are in productive instead of lost_work.",
    ),
    Metric(
        name="gpulaunch_restarts_total",
        kind=Kind.COUNTER,
        labels=(one_of("kind", *RESTART_KINDS),),
        help="Restarts of the ranks, by the kind of failure that ended the previous attempt.",
    ),
    Metric(
        name="gpulaunch_hang_suspicions_total",
        kind=Kind.COUNTER,
        help="Warnings of ranks without progress for longer than usual; most of them continue by themselves.",
    ),
    Metric(
        name="gpulaunch_hangs_total",
        kind=Kind.COUNTER,
        help="Hangs that were proven, or lasted for --hang-timeout.",
    ),
    Metric(
        name="gpulaunch_rank_stalled_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        labels=(RANK,),
        help="Time without progress of a rank, while a warning is active; absent otherwise.",
    ),
    Metric(
        name="gpulaunch_preempted",
        kind=Kind.GAUGE,
        help="1 after the run was asked to save and end.",
    ),
)
