"""The vocabulary of what is measured: frozen values, the unit in every field name.

Everything here is plain data that one thread makes and any other may read: a `NodeState` is published whole, once a
refresh, and never changed afterwards. Quantities stay in the unit in which they were counted (ns, bytes, ticks
already turned into seconds); the exporters convert at the edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Generic, Protocol, TypeVar

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
    DEVICE = "device"
    WORKERS = "workers"
    COLLECTIVES = "collectives"
    STACKS = "stacks"
    FINDINGS = "findings"
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
    """The dataloader of a rank: its queue when the training loop last asked for a batch, and what was waited so far."""

    ready: int
    outstanding: int
    reorder_blocked: int
    pin_backlog: int
    """Batches that workers have delivered and the thread that pins has not."""
    workers_configured: int
    batches: int
    eval_batches: int
    """Of them, fetched with gradients off."""
    batch_bytes_total: int
    wait_ns_total: int
    transfer_ns_total: int
    """Of the wait: a batch was ready, and had to be unpickled, mapped, pinned."""
    blocked_ns_total: int
    """Of the wait: batches were there, but an earlier one was not (`in_order`)."""
    wait_counts: tuple[int, ...]
    """Waits per bucket of `TrainingState.step_bounds_s`, not cumulated; one longer than the bounds."""


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """torch's caching allocator in one rank."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    active_bytes: int
    inactive_split_bytes: int
    """Free parts of blocks that are in use: they cannot be given back, and larger requests do not fit."""
    alloc_retries: int
    """Times that everything cached had to be given back before an allocation succeeded."""
    ooms: int
    pinned_bytes: int
    """Host memory that torch holds pinned for this rank."""


@dataclass(frozen=True, kw_only=True)
class GpuTime:
    """Time on the GPU of those steps that were timed there."""

    steps: int
    step_ns_total: int
    forward_ns_total: int
    backward_ns_total: int
    optimizer_ns_total: int


@dataclass(frozen=True, kw_only=True)
class CopyTotals:
    """What was copied in one direction, from or to one kind of host memory."""

    count: int
    size_bytes: int
    blocked_ns: int
    gpu_ns: int


@dataclass(frozen=True, kw_only=True)
class SyncTotals:
    """What the program waited for the GPU by."""

    calls: int
    blocked_ns: int


@dataclass(frozen=True, kw_only=True)
class Site:
    """What one line of the program did, in the running attempt."""

    kind: str
    """One of `channel.layout.SITE_KINDS`."""
    text: str
    """`path:line function`; empty for all lines that found no row of their own."""
    count: int
    size_bytes: int
    blocked_ns: int
    gpu_ns: int
    pinned: int
    non_blocking: int


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """What stops a program inside or outside of its steps. Counts and sums cover all attempts of the run."""

    gc_collections: int
    gc_ns_total: int
    compiles: int
    compile_ns_total: int
    comm_calls: int
    comm_blocked_ns_total: int
    ddp_comm_ns: int
    """Of one step, as DistributedDataParallel logged it last: all of its communication."""
    ddp_overlap_ns: int
    """The part of it that backward hid."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """What it costs a rank to be observed. The count covers all attempts of the run, the rest is the running one's."""

    budget_ratio: float
    """Share of a step's time that it may cost; past it, parts are switched off. 0: no limit."""
    hooks_shed: tuple[str, ...]
    """The parts that were, lower case."""
    unobserved_steps: int
    """Steps made without the probe, to be compared with those around them."""
    pairs: int
    """Comparisons that the next two are of."""
    paired_cost_ns: int | None
    """By how much steps with the probe are longer than those without, which may come out below zero; None: not known
    yet."""
    paired_error_ns: int | None
    """Standard error of that."""


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
    gpu_time: GpuTime | None
    checkpoint: CheckpointState | None
    copies: Mapping[tuple[str, str], CopyTotals]
    """By direction and host memory, as `channel.layout.COPIES`; only what there was."""
    syncs: Mapping[str, SyncTotals]
    """By `channel.layout.SYNCS`; only what there was."""
    sites: tuple[Site, ...]
    pauses: Pauses
    price: Price
    facts: Mapping[str, Any]
    """What the rank says about its surroundings, as `probe.facts` wrote it; empty before that."""
    hooks_unavailable: tuple[str, ...]
    """Parts of the probe that are out of service, lower case."""
    fault: str
    """Why the last of them is."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory held now and CPU time used so far, summed over the processes of one role of one rank."""

    rss_bytes: int
    pss_bytes: int | None
    """None until every process of the role has been asked (it is dear, so it is asked rarely)."""
    cpu_user_s: float
    cpu_system_s: float
    """CPU seconds include processes that have ended."""
    anonymous_bytes: int | None = None
    """Of the resident memory, what is no file's and nobody's but theirs: the rest are pages that files are mapped to,
    which the kernel takes back when it needs them, and shared memory. None where it is not known."""
    pss_anonymous_bytes: int | None = None
    """The same of the proportional size; None also where the kernel does not tell it apart (older ones)."""


@dataclass(frozen=True, kw_only=True)
class RankProcesses:
    """The processes of one rank."""

    rank: int
    usage: Mapping[Role, Usage]
    workers_alive: int
    """Living dataloader workers (they name themselves `pt_data_worker`); other children are in the usage only."""
    runqueue_s: Mapping[Role, float] = field(default_factory=dict[Role, float])
    """Seconds that threads of the role were ready to run and had no core, those of processes that ended included: of
    all threads, so more than a second a second is possible. Empty where the kernel does not count it."""
    threads: float | None = None
    """How many threads of the rank, workers included, ran or waited for a core, on average between the last two
    looks at each; None before the second look. Over all ranks more than the cores of the node: oversubscribed."""
    shm_inflight_bytes: Mapping[int, int] = field(default_factory=dict[int, int])
    """Shared memory that holds batches, by the pid of the worker that made them (it may have ended): made and not yet
    freed by the rank. As of the last look, some ten seconds ago at most while there is time for it."""


@dataclass(frozen=True, kw_only=True)
class LoaderWorkers:
    """All dataloader workers of one rank so far, over all attempts of the run. All times are of fetches."""

    rank: int
    batches: int
    samples: int
    wall_ns: int
    """The next three sum to it."""
    cpu_ns: int
    """On a core: preparing."""
    runqueue_ns: int
    """Ready to run, and no core was free."""
    blocked_ns: int
    """Waiting for anything else: storage, a network, a lock."""
    collate_ns: int
    """Of the wall time: making a batch of samples."""
    storage_bytes: int
    """Read from a device or a network file system."""
    cached_bytes: int
    """Read from memory: the page cache, pipes."""
    alive: int
    """Workers that live now and have fetched."""
    knows_runqueue: bool
    """False: the kernel does not count it, and `blocked_ns` holds it too."""


@dataclass(frozen=True, kw_only=True)
class RankCollectives:
    """The collectives of one rank. Counts cover all attempts of the run, the last three are of the running one."""

    rank: int
    calls: Mapping[str, int]
    """Calls that the training thread has begun, by `channel.collectives.KINDS`; only what there was. What
    DistributedDataParallel begins, in C++, is in the next two only."""
    enqueued: int | None
    """Collectives of all process groups that were begun, as torch's flight recorder numbers them; None: it says
    nothing. It is asked once a second, at the end of a step."""
    completed: int | None
    sequence: int | None
    """Number of the last one that was begun in the default process group: who is behind the others is waited for."""
    last: str | None
    """The kind of the last call."""
    running: bool
    """Whether the training thread is inside of it."""


@dataclass(frozen=True, kw_only=True)
class HostState:
    """What all ranks of this node share; None, or not in the mapping, where the kernel would not say."""

    shm_size_bytes: int | None
    shm_used_bytes: int | None
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    page_cache_bytes: int | None = None
    """Files of disks that are in memory; shared memory is not in it, though the kernel counts it there."""
    swap_used_bytes: int | None = None
    pressure_s: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """Seconds since boot in which tasks of the node stood still for want of a resource, by resource (`cpu`, `io`,
    `memory`) and severity (`some`: at least one task, `full`: all of them; there is no `full` for cpu)."""
    cgroup_limit_bytes: int | None = None
    """Memory limit of the control group with the least room left, ours or one above; None without any limit."""
    cgroup_used_bytes: int | None = None
    """What counts against that limit, without the page cache of files, which the kernel takes back before it kills."""
    cpu_quota_cores: float | None = None
    """Cores' worth of time that our control group may use; None without a quota."""
    cores: int | None = None
    """Cores that processes of this node's agent may run on (the affinity mask), whatever the quota."""


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


DIRECTIONS: Final = ("receive", "transmit")
"""As the GPU sees it: what it receives is copied to it."""
THROTTLE_REASONS: Final = (
    *("power_cap", "thermal", "sync_boost", "board_limit", "reliability"),
    *("hw_slowdown", "hw_thermal", "hw_power_brake"),
)


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One GPU of the node, or one MIG instance, as NVML has it. What is not known is None, or not in the mapping.

    Sums and counts are since the run began; but ECC errors and remapped rows are the card's own.
    """

    index: int
    """The card's, as NVML counts; an instance has its card's."""
    uuid: str
    """What ranks know it by: `GPU-...`, or `MIG-...` for an instance."""
    parent_uuid: str | None
    """The card's UUID, for a MIG instance. What is measured on cards only, such as power and PCIe, is with the card."""
    model: str
    age_s: float = 0.0
    """How long ago this was read; 0 for a reading that came in time."""
    utilization_ratio: float | None = None
    """Share of the last 1/6 to 1 s in which at least one kernel ran, however small: never a verdict by itself."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    sm_clock_hertz: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    throttled_by: tuple[str, ...] = ()
    """What keeps the clocks down now, of THROTTLE_REASONS."""
    throttle_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """By reason; several may hold at once, so this is nothing to add up."""
    pcie_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """By direction, everything that crosses the link: copies, peers, pages. Where the card's counter cannot be
    followed these are GPM's rates, summed up."""
    pcie_generation: int | None = None
    """Of the link now: idle cards step back to save power, so it means something under load only."""
    pcie_generation_max: int | None = None
    """What card and slot can do together."""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    """Packets that had to be sent again: a bad slot or riser."""
    nvlink_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """By direction, all links together, payload only."""
    ecc_errors: Mapping[str, int] = field(default_factory=dict[str, int])
    """`corrected` and `uncorrected`, since the driver was loaded."""
    remapped_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of memory, in the card's life, by what they were remapped for: `correctable` and `uncorrectable` errors."""
    remap_pending: bool | None = None
    """Rows wait for a reset of the card to be remapped."""
    remap_failed: bool | None = None
    """A row could not be remapped: the card should be replaced."""
    gpm_ratios: Mapping[str, float] = field(default_factory=dict[str, float])
    """How busy the insides were between the last two readings, by the names of `gpm.RATIOS`; Hopper and newer."""
    numa_node: int | None = None
    """Of its slot; None where the machine has one node only, or does not tell."""


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
class StackState:
    """What was sampled, in all attempts of the run."""

    source: str
    """What takes the stacks."""
    samples: Mapping[str, int]
    """By phase of `phases.STACK_PHASES`; only those seen."""
    cpu_s: float
    """What looking has cost since this sidecar started, py-spy's share included."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to change, and what it costs as it is."""

    rule: str
    file: str | None
    line: int | None
    subject: str
    ranks: tuple[int, ...]
    seconds_per_step: float
    """What every step would be shorter by; 0 where time is not what is lost, or not yet."""
    seconds_per_hour: float
    """The same for an hour of training as it is now."""
    confidence: float
    """0..1; see `analysis.finding`."""
    evidence: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    """Of the rank that loses most; the unit is in every name."""
    advice: str

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What makes it the same finding in another window."""
        return self.rule, self.file or "", self.line or 0, self.subject

    def as_json(self) -> dict[str, Any]:
        """Give it for a file that machines read."""
        return {
            "rule": self.rule,
            "file": self.file,
            "line": self.line,
            "subject": self.subject,
            "ranks": list(self.ranks),
            "seconds_per_step": _rounded(self.seconds_per_step),
            "seconds_per_hour": _rounded(self.seconds_per_hour),
            "confidence": self.confidence,
            "evidence": {
                name: value if isinstance(value, str) else _rounded(value) for name, value in self.evidence.items()
            },
            "advice": self.advice,
        }


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
    workers: tuple[LoaderWorkers, ...] = ()
    collectives: tuple[RankCollectives, ...] = ()
    devices: tuple[GpuState, ...] = ()
    stacks: StackState | None = None
    findings: tuple[Finding, ...] = ()
    """What stands now, the largest loss first."""
    collectors: Mapping[Collector, CollectorState]
    sidecar: SidecarState


def _rounded(value: float) -> float:
    """Leave out the digits that no measurement has."""
    return float(f"{value:.6g}")
