"""Data types of all measurements: frozen values, with the unit in every field name.

Everything here is plain data that one thread creates and any other may read: a `NodeState` is published whole, once per
refresh, and never changed afterwards. Quantities stay in the unit in which they were counted (ns, bytes; ticks are
already converted to seconds); the exporters convert at the edge.
"""

from __future__ import annotations

from gpulaunch.profiler.channel.quantities import (
    CheckpointState,
    CopyTotals,
    GpuMemory,
    GpuTime,
    LoaderState,
    Pauses,
    StepTotals,
    SyncTotals,
)
from gpulaunch.profiler.channel.segment import Site
from gpulaunch.profiler.record.finding import Finding, ends_job_soon, order_of
from gpulaunch.profiler.record.gpus import DIRECTIONS, THROTTLE_REASONS, GpuHealth, GpuState, bare_uuid
from gpulaunch.profiler.record.node import GOODPUT_BUCKETS, RESTART_KINDS, HostState, NodeState, RunState, StackState
from gpulaunch.profiler.record.ranks import (
    AttemptGroup,
    LoaderWorkers,
    RankCollectives,
    RankPlace,
    RankProcesses,
    Role,
    Usage,
)
from gpulaunch.profiler.record.reading import Collector, CollectorState, Reading, Sampler, SidecarState
from gpulaunch.profiler.record.training import TrainingState

__all__ = [
    "DIRECTIONS",
    "GOODPUT_BUCKETS",
    "RESTART_KINDS",
    "THROTTLE_REASONS",
    "AttemptGroup",
    "CheckpointState",
    "Collector",
    "CollectorState",
    "CopyTotals",
    "Finding",
    "GpuHealth",
    "GpuMemory",
    "GpuState",
    "GpuTime",
    "HostState",
    "LoaderState",
    "LoaderWorkers",
    "NodeState",
    "Pauses",
    "RankCollectives",
    "RankPlace",
    "RankProcesses",
    "Reading",
    "Role",
    "RunState",
    "Sampler",
    "SidecarState",
    "Site",
    "StackState",
    "StepTotals",
    "SyncTotals",
    "TrainingState",
    "Usage",
    "bare_uuid",
    "ends_job_soon",
    "order_of",
]
