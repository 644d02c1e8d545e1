"""Data types of the node's state at one refresh, and of what all its ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gpulaunch.profiler.record.finding import Finding
from gpulaunch.profiler.record.gpus import GpuHealth, GpuState
from gpulaunch.profiler.record.ranks import AttemptGroup, LoaderWorkers, RankCollectives, RankProcesses
from gpulaunch.profiler.record.reading import Collector, CollectorState, SidecarState
from gpulaunch.profiler.record.training import TrainingState

GOODPUT_BUCKETS: Final = (
    "productive",
    "checkpoint_stall",
    "detection",
    "teardown",
    "restart",
    "lost_work",
    "startup",
)
"""Where the time of a run goes; every second is in exactly one bucket."""

RESTART_KINDS: Final = (
    *("exception", "syntax", "import", "peer", "loader_worker", "gpu_oom", "gpu_fault", "gpu_hardware", "host_oom"),
    *("shm_full", "disk_full", "port_in_use", "segfault", "bus_error", "abort", "signal", "interrupt", "exit_code"),
    *("early_exit_0", "hang", "preempted", "stopped", "checkpoint_in_use", "node_loss", "other"),
)
"""What ends an attempt, as the agent names it; any other name counts as "other"."""


@dataclass(frozen=True, kw_only=True)
class HostState:
    """What all ranks of this node share; None, or not in the mapping, where the kernel does not report it."""

    shm_size_bytes: int | None
    shm_used_bytes: int | None
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    page_cache_bytes: int | None = None
    """Files on disk that are cached in memory; without shared memory, which the kernel's figure includes."""
    swap_used_bytes: int | None = None
    pressure_s: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """Seconds since boot in which tasks of the node stalled for lack of a resource, by resource (`cpu`, `io`,
    `memory`) and severity (`some`: at least one task, `full`: all of them; there is no `full` for cpu)."""
    cgroup_limit_bytes: int | None = None
    """Memory limit of the control group with the least headroom, ours or one above; None without any limit."""
    cgroup_used_bytes: int | None = None
    """Memory charged to that limit, without the page cache of files, which the kernel reclaims before it kills."""
    cpu_quota_cores: float | None = None
    """CPU time that our control group may use, in cores; None without a quota."""
    cores: int | None = None
    """Cores that processes of this node's agent may run on (the affinity mask), whatever the quota."""
    loop_ns: float | None = None
    """CPU time of a turn of a loop of Python's: how fast this host is at the moment."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of the run, as its agent reports it in run.json. No count ever falls, though the agent may revise it."""

    goodput_ns: Mapping[str, int]
    """By bucket of GOODPUT_BUCKETS."""
    restarts: Mapping[str, int]
    """By kind of RESTART_KINDS; only kinds that occurred."""
    hang_suspicions: int
    hangs: int
    preempted: bool
    stalled_since_ns: Mapping[int, int] = field(default_factory=dict[int, int])
    """CLOCK_MONOTONIC of the last progress of ranks reported as stalled, by rank."""


@dataclass(frozen=True, kw_only=True)
class StackState:
    """Stack samples of all attempts of the run."""

    source: str
    """The tool that takes the stacks."""
    samples: Mapping[str, int]
    """By phase of `phases.STACK_PHASES`; only those seen."""
    cpu_s: float
    """CPU time of sampling since this sidecar started, py-spy included."""


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """Everything known about this node at one refresh."""

    taken_monotonic_ns: int
    taken_wall_ns: int
    """The same instant on the wall clock, so that monotonic times of a rank can be converted to wall time."""
    group: AttemptGroup | None
    training: tuple[TrainingState, ...]
    processes: tuple[RankProcesses, ...]
    host: HostState | None
    run: RunState | None
    gpus: tuple[GpuHealth, ...]
    workers: tuple[LoaderWorkers, ...] = ()
    collectives: tuple[RankCollectives, ...] = ()
    devices: tuple[GpuState, ...] = ()
    stacks: StackState | None = None
    findings: tuple[Finding, ...] = ()
    """Current findings, the largest loss first."""
    judged: bool = True
    """False: too little data to find anything yet; the findings of an earlier sidecar still hold."""
    collectors: Mapping[Collector, CollectorState]
    sidecar: SidecarState
