"""The vocabulary of what is measured: frozen values, the unit in every field name.

Everything here is plain data that one thread makes and any other may read: a `NodeState` is published whole, once a
refresh, and never changed afterwards. Quantities stay in the unit in which they were counted (ns, bytes, ticks
already turned into seconds); the exporters convert at the edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Reading(Generic[T_co]):
    """What one sampler saw at one moment; trouble travels in the result, it does not break the loop."""

    values: T_co
    absent: str = ""
    """Why there is no such source on this node, if there is none: no error, but nothing that is delivered either."""
    errors: tuple[str, ...] = ()
    """What could not be read this time, one line each, without user data. A process that ended is no error."""
    late_s: float = 0.0
    """Seconds from the moment asked for until the last value was read: values carry that much uncertainty in time."""


class Sampler(Protocol[T_co]):
    """A source of measurements: one file per source, one verb."""

    def read(self, now: float) -> Reading[T_co]:
        """Give what the source says now (monotonic seconds); never blocks on a rank."""
        ...


class Collector(Enum):
    """The parts of the sidecar that can fail on their own; the value is the metric label."""

    RANKS = "ranks"
    PROCESS = "process"
    HOST = "host"
    RUN = "run"
    GPU = "gpu"
    LEDGER = "ledger"


class Role(Enum):
    """Whose share of a rank's memory and CPU: the training process itself, or every process below it."""

    TRAINER = "trainer"
    WORKERS = "workers"


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """One rank of the running attempt, as the agent started it."""

    rank: int
    local_rank: int
    pid: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """The running attempt, as the agent described it in group.json."""

    run_id: str
    name: str
    attempt: int
    world_size: int
    node_rank: int
    ranks: tuple[RankPlace, ...]


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """The dataloader queue of a rank when its training loop last asked for a batch."""

    ready: int
    outstanding: int
    reorder_blocked: int
    workers_configured: int
    batches: int


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """torch's caching allocator in one rank."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """What a rank that uses gpulaunch.checkpoint tells of its saves. Counts and sums cover all attempts of the run."""

    saves: int
    failures: int
    stall_ns_total: int
    bytes_total: int
    newest_step: int | None
    """Of the newest checkpoint that it committed, in whichever attempt."""
    captured_monotonic_ns: int | None
    """When the state in that one was taken."""
    resumed_step: int | None
    """What the running attempt went on from; None: from nothing."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """One rank's training loop. Counts and sums cover all attempts of the run; gauges are the running attempt's."""

    rank: int
    armed: bool
    """Whether the probe armed in the rank: a program without torch never does, and then all counts stay 0."""
    steps: int
    microsteps: int
    samples: int
    skipped_steps: int
    step_ns_total: int
    step_bounds_s: tuple[float, ...]
    """Upper bounds of the step duration buckets; the last bucket (above them all) has none."""
    step_counts: tuple[int, ...]
    """Steps per bucket, not cumulated; one longer than the bounds."""
    phase_ns: Mapping[str, int]
    probe_ns_total: int
    step_source: str | None
    last_step_monotonic_ns: int | None
    loader: LoaderState | None
    gpu: GpuMemory | None
    checkpoint: CheckpointState | None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory held now and CPU time used so far, summed over the processes of one role of one rank."""

    rss_bytes: int
    pss_bytes: int | None
    """None until every process of the role has been asked (it is dear, so it is asked rarely)."""
    cpu_user_s: float
    cpu_system_s: float
    """CPU seconds include processes that have ended."""


@dataclass(frozen=True, kw_only=True)
class RankProcesses:
    """The processes of one rank."""

    rank: int
    usage: Mapping[Role, Usage]
    workers_alive: int
    """Living dataloader workers (they name themselves `pt_data_worker`); other children are in the usage only."""


@dataclass(frozen=True, kw_only=True)
class HostState:
    """What all ranks of this node share; None where the kernel would not say."""

    shm_size_bytes: int | None
    shm_used_bytes: int | None
    memory_total_bytes: int | None
    memory_available_bytes: int | None


GOODPUT_BUCKETS: Final = (
    "productive",
    "checkpoint_stall",
    "detection",
    "teardown",
    "restart",
    "lost_work",
    "startup",
)
"""Where the time of a run goes; every second is in one of them."""

RESTART_KINDS: Final = (
    *("exception", "syntax", "import", "peer", "loader_worker", "gpu_oom", "gpu_fault", "gpu_hardware", "host_oom"),
    *("shm_full", "disk_full", "port_in_use", "segfault", "bus_error", "abort", "signal", "interrupt", "exit_code"),
    *("early_exit_0", "hang", "preempted", "stopped", "node_loss", "other"),
)
"""What ends an attempt, as the agent names it; whatever has another name is "other"."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """How the run goes, as its agent says in run.json. None of it falls, though the agent may think better of it."""

    goodput_ns: Mapping[str, int]
    """By bucket of GOODPUT_BUCKETS."""
    restarts: Mapping[str, int]
    """By kind of RESTART_KINDS; only what there was."""
    hang_suspicions: int
    hangs: int
    preempted: bool


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """What the driver holds against one GPU of the node."""

    index: int
    uuid: str
    xids: Mapping[int, int]
    """How often each critical Xid was reported since this run began."""
    ecc_uncorrected: int | None
    """Since the driver was loaded; None where ECC is off or not there."""
    recovery_action: str
    """`none`, or what the driver says that the GPU needs; `unknown` where it cannot say."""


@dataclass(frozen=True, kw_only=True)
class CollectorState:
    """How one collector is doing."""

    available: bool
    reason: str
    """Why not, or what failed last; empty if nothing ever did."""
    errors: int
    spent_s: float


@dataclass(frozen=True, kw_only=True)
class SidecarState:
    """What the sidecar itself costs."""

    cpu_s: float
    rss_bytes: int | None
    refreshes: int
    late_refreshes: int
    """Refreshes that came a whole interval too late or more."""
    refresh_s: float
    """How long the refresh before this one took."""


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """Everything known about this node at one refresh."""

    taken_monotonic_ns: int
    taken_wall_ns: int
    """The same moment on both clocks, so that a monotonic time of a rank can be told as wall time."""
    group: Group | None
    training: tuple[TrainingState, ...]
    processes: tuple[RankProcesses, ...]
    host: HostState | None
    run: RunState | None
    gpus: tuple[GpuHealth, ...]
    collectors: Mapping[Collector, CollectorState]
    sidecar: SidecarState
