"""The part of a run's view that is of one rank; see `model`, whose conventions hold here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Curve: TypeAlias = tuple[float | None, ...]
"""A quantity over the intervals of `RunView.times_s`: its mean in each. None: unknown there. Empty: never known."""


@dataclass(frozen=True, kw_only=True)
class LoaderView:
    """The dataloader of a rank: totals of the run, and its queue now."""

    batches: int
    eval_batches: int
    batch_bytes: int
    wait_seconds: float
    transfer_seconds: float | None
    """Part of the wait: for a batch that was ready. None where the queue is not read."""
    reorder_blocked_seconds: float | None
    """Part of the wait: for a batch while later ones were ready. None, as above."""
    ready: int | None = None
    outstanding: int | None = None
    reorder_blocked: int | None = None
    pin_backlog: int | None = None
    workers_configured: int | None = None
    workers_alive: int | None = None
    worker_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of all workers, inside of fetches: `prep` on a core, `contention` waiting for one, `blocked` for other things."""
    storage_bytes: int | None = None
    cached_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class CopyView:
    """Copies in one direction, from or to one kind of host memory; totals of the run."""

    direction: str
    """`h2d`, `d2h` or `d2d`."""
    host_memory: str
    """`pageable`, `pinned`, or "" where there is none."""
    count: int
    size_bytes: int
    blocked_seconds: float
    gpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class SyncView:
    """Waits for the GPU by one kind of call; totals of the run."""

    kind: str
    calls: int
    blocked_seconds: float


@dataclass(frozen=True, kw_only=True)
class SiteView:
    """What one line of the program did in its newest attempt, over all ranks that have the line."""

    kind: str
    """One of `channel.layout.SITE_KINDS`."""
    text: str
    """`path:line function`; "" for all lines without a row of their own."""
    ranks: tuple[int, ...]
    count: int
    size_bytes: int
    blocked_seconds: float
    """Summed over its ranks, as every quantity here."""
    gpu_seconds: float
    pinned: int
    non_blocking: int


@dataclass(frozen=True, kw_only=True)
class MemoryView:
    """Memory of a rank, now or when it was last seen."""

    rss_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Resident, shared pages counted in each; by `trainer` and `workers`."""
    pss_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Proportional: may be added up."""
    shm_inflight_bytes: int | None = None
    gpu_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """torch's allocator: `allocated`, `reserved`, `peak_allocated`, `peak_reserved`, `active`, `inactive_split`."""
    pinned_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None


@dataclass(frozen=True, kw_only=True)
class PauseView:
    """What stopped a rank besides its phases; totals of the run."""

    gc_collections: int
    gc_seconds: float
    compiles: int
    compile_seconds: float
    comm_calls: int
    comm_blocked_seconds: float


@dataclass(frozen=True, kw_only=True)
class CollectiveView:
    """Progress of a rank's collectives."""

    calls: Mapping[str, int]
    """By kind; totals of the run."""
    enqueued: int | None = None
    completed: int | None = None
    sequence: int | None = None
    """Sequence number of the last one begun: the others wait for a rank that is behind."""


@dataclass(frozen=True, kw_only=True)
class CostView:
    """Overhead of the probe on a rank."""

    probe_seconds: float
    """What the probe took of the steps, in total."""
    budget_ratio: float | None = None
    """Limit of the probe's share of a step; None: no limit."""
    unobserved_steps: int = 0
    """Steps that were not observed, to stay within it."""
    parts_unavailable: tuple[str, ...] = ()
    """Parts out of service."""
    fault: str = ""
    """Why the last of them is out of service."""


@dataclass(frozen=True, kw_only=True)
class RankView:
    """One rank. Totals are of the run, all attempts together; `_now` values cover the last `RunView.recent_seconds`,
    or all steps of a finished run."""

    rank: int
    node: int = 0
    local_rank: int | None = None
    pid: int | None = None
    armed: bool = False
    """Whether the probe measures in it."""
    step_source: str | None = None
    steps: int | None = None
    """None where no probe has seen it; so are the four that follow."""
    microsteps: int | None = None
    skipped_steps: int | None = None
    samples: int | None = None
    """Also None where no batch size was seen."""
    step_seconds: float | None = None
    """Time of all its steps, or of those below."""
    timed_steps: int | None = None
    """How many steps that covers: a killed rank has not reported the times of its last ones. None: all."""
    last_step_s: float | None = None
    """When the last one ended."""
    steps_per_second_now: float | None = None
    step_seconds_now: float | None = None
    """Mean length of a step."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """By phase, in the order of `channel.layout.PHASES`."""
    phase_ratios_now: Mapping[str, float] = field(default_factory=dict[str, float])
    """Share of the steps' time; empty without recent steps."""
    gpu_phase_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """On the GPU's clock, for the steps timed there."""
    cpu_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """CPU time by `trainer` and `workers`."""
    cores_now: Mapping[str, float] = field(default_factory=dict[str, float])
    """The same per second, now: cores in use."""
    loader: LoaderView | None = None
    copies: tuple[CopyView, ...] = ()
    syncs: tuple[SyncView, ...] = ()
    memory: MemoryView = field(default_factory=MemoryView)
    pauses: PauseView | None = None
    collectives: CollectiveView | None = None
    cost: CostView | None = None
    # over time
    steps_per_second: Curve = ()
    step_mean_seconds: Curve = ()
    """Mean length of a step."""
    phase_ratios: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    """By phase, only those that occurred; share of the steps' time."""
    rss_bytes: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    """By `trainer` and `workers`."""
    gpu_bytes: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    """`allocated` and `reserved`."""
    most_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Known peak of each of these: over all samples (`live`, and in a time window: now), and once the run is over, over
    all its attempts. Curves are means. For a GPU, peaks between samples count too."""
    loader_ready: Curve = ()
    """Batches that were ready."""
    copy_bytes_per_second: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    """By direction."""
    # whatever is measured, also what nothing above shows
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """The newest value of every metric of the rank, as /metrics has it without its prefix and the rank:
    `gpu_memory_bytes{state="active"}`. Totals are of the run."""
