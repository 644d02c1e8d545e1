"""Metrics of checkpoints, restarts, and where the time of the run goes."""

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
        help="Since the state in the newest checkpoint of this node's ranks was taken: what a failure now would cost.",
    ),
    Metric(
        name="gpulaunch_goodput_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(one_of("bucket", *GOODPUT_BUCKETS),),
        help="Where the time of the run went, as its agent on this node sees it; every second is in one bucket."
        " checkpoint_stall is of the rank that stood still longest for saves, whoever saves. Steps that must be done"
        " again are lost work, and productive stands still until they are made up for. Where it is not seen what"
        " an attempt went on from, what it did again is in productive, and not in lost_work.",
    ),
    Metric(
        name="gpulaunch_restarts_total",
        kind=Kind.COUNTER,
        labels=(one_of("kind", *RESTART_KINDS),),
        help="Times that the ranks were started again, by what ended the attempt before.",
    ),
    Metric(
        name="gpulaunch_hang_suspicions_total",
        kind=Kind.COUNTER,
        help="Times that ranks stood still for longer than is usual, and it was told; most go on by themselves.",
    ),
    Metric(
        name="gpulaunch_hangs_total",
        kind=Kind.COUNTER,
        help="Those that were proven to be hangs, or lasted for --hang-timeout.",
    ),
    Metric(
        name="gpulaunch_rank_stalled_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        labels=(RANK,),
        help="How long a rank has not moved, while that is told; no sample while it moves.",
    ),
    Metric(
        name="gpulaunch_preempted",
        kind=Kind.GAUGE,
        help="1 from the moment that the run was asked to save and to end.",
    ),
)
