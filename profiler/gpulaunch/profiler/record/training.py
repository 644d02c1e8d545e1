"""Data types of one rank's training loop: its steps, and where their time goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """The dataloader of a rank: its queue when the training loop last requested a batch, and the waits so far."""

    ready: int
    outstanding: int
    reorder_blocked: int
    pin_backlog: int
    """Batches delivered by workers, not yet by the pin-memory thread."""
    workers_configured: int
    batches: int
    eval_batches: int
    """Of `batches`: fetched with gradients off."""
    batch_bytes_total: int
    wait_ns_total: int
    transfer_ns_total: int
    """Of the wait: a batch was ready, but had to be unpickled, mapped, pinned."""
    blocked_ns_total: int
    """Of the wait: later batches were ready, but an earlier one was not (`in_order`)."""
    wait_counts: tuple[int, ...]
    """Waits per bucket of `TrainingState.step_bounds_s`, not cumulative; one longer than the bounds."""


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """torch's caching allocator in one rank."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    active_bytes: int
    inactive_split_bytes: int
    """Free parts of blocks that are in use: they cannot be released, and larger requests do not fit."""
    alloc_retries: int
    """Number of times that the whole cache had to be released before an allocation succeeded."""
    ooms: int
    pinned_bytes: int
    """Host memory that torch holds pinned for this rank."""


@dataclass(frozen=True, kw_only=True)
class GpuTime:
    """GPU time of the steps that were timed on the GPU."""

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
    """Waits for the GPU by one operation."""

    calls: int
    blocked_ns: int


@dataclass(frozen=True, kw_only=True)
class Site:
    """What one line of the program did in the current attempt."""

    kind: str
    """One of `channel.layout.SITE_KINDS`."""
    text: str
    """`path:line function`; empty for all lines without a row of their own."""
    count: int
    size_bytes: int
    blocked_ns: int
    gpu_ns: int
    pinned: int
    non_blocking: int


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """Pauses of a program inside or outside its steps. Counts and sums cover all attempts of the run."""

    gc_collections: int
    gc_ns_total: int
    compiles: int
    compile_ns_total: int
    comm_calls: int
    comm_blocked_ns_total: int
    ddp_comm_ns: int
    """Of one step, as last logged by DistributedDataParallel: all of its communication."""
    ddp_overlap_ns: int
    """The part of it that overlapped with backward."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """The probe's overhead in a rank. The count covers all attempts of the run, the rest is the current one's."""

    budget_ratio: float
    """Allowed overhead as a share of a step's time; above it, parts are switched off. 0: no limit."""
    hooks_shed: tuple[str, ...]
    """The parts that were switched off, lower case."""
    unobserved_steps: int
    """Steps made without the probe, for comparison with those around them."""
    pairs: int
    """Number of comparisons behind the next two."""
    paired_cost_ns: int | None
    """By how much steps with the probe are longer than those without; may be negative. None: not known yet."""
    paired_error_ns: int | None
    """Standard error of that."""


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """The saves of a rank that uses gpulaunch.checkpoint. Counts and sums cover all attempts of the run."""

    saves: int
    failures: int
    stall_ns_total: int
    bytes_total: int
    newest_step: int | None
    """Of the newest checkpoint that it committed, in any attempt."""
    captured_monotonic_ns: int | None
    """When the state in that one was taken."""
    resumed_step: int | None
    """The step that the current attempt resumed from; None: from scratch."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """One rank's training loop. Counts and sums cover all attempts of the run; gauges are the current attempt's."""

    rank: int
    armed: bool
    """Whether the probe is armed in the rank: without torch it never is, and then all counts stay 0."""
    steps: int
    microsteps: int
    samples: int
    skipped_steps: int
    step_ns_total: int
    step_bounds_s: tuple[float, ...]
    """Upper bounds of the step duration buckets; the last bucket (above them all) has none."""
    step_counts: tuple[int, ...]
    """Steps per bucket, not cumulative; one longer than the bounds."""
    phase_ns: Mapping[str, int]
    probe_ns_total: int
    step_source: str | None
    last_step_monotonic_ns: int | None
    loader: LoaderState | None
    gpu: GpuMemory | None
    gpu_time: GpuTime | None
    checkpoint: CheckpointState | None
    copies: Mapping[tuple[str, str], CopyTotals]
    """By direction and host memory, as `channel.layout.COPIES`; only those that occurred."""
    syncs: Mapping[str, SyncTotals]
    """By `channel.layout.SYNCS`; only those that occurred."""
    sites: tuple[Site, ...]
    pauses: Pauses
    price: Price
    facts: Mapping[str, Any]
    """The rank's facts about its environment, as written by `probe.facts`; empty before that."""
    hooks_unavailable: tuple[str, ...]
    """Parts of the probe that are unavailable, lower case."""
    fault: str
    """Why the last of them is unavailable."""
