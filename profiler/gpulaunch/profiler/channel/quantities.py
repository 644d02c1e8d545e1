"""The quantities of a rank. To add one: a line here, and the code that measures it.

It then has a word in the segment, is summed over attempts, has a difference over a window (`analysis`), a metric with
its help, a series in the store and a row in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpulaunch.profiler.channel.declare import (
    counter,
    counters,
    gauge,
    histogram,
    layout_id,
    quantities,
    quantities_of,
    table_row,
)
from gpulaunch.profiler.channel.layout import PHASES, STEP_BUCKETS, Word


@quantities
class StepTotals:
    """Steps and the time of their phases. Most of it is written together at the end of a step."""

    steps: int = counter("steps_total", "Optimizer steps, all attempts together.", word=Word.STEPS)
    samples: int = counter(
        "samples_total", "Samples received from the DataLoader, if the batch size is known.", word=Word.SAMPLES
    )
    microsteps: int = counter(
        "microsteps_total",
        "Backward passes; more than the steps if gradients are accumulated.",
        word=Word.MICROSTEPS,
    )
    skipped_steps: int = counter(
        "skipped_steps_total",
        "Steps in which the optimizer was skipped, for example by a gradient scaler after an overflow.",
        word=Word.SKIPPED_STEPS,
    )
    step_ns_total: int = counter(word=Word.STEP_NS_TOTAL)
    step_counts: tuple[int, ...] = histogram(
        "step_duration_seconds",
        "Time from the end of one step to the end of the next.",
        word=Word.STEP_HISTOGRAM,
        buckets=STEP_BUCKETS,
        total="step_ns_total",
    )
    """Steps per bucket of `layout.STEP_BOUNDS_S`, not cumulative; one more than those."""
    phase_ns: Mapping[str, int] = counters(
        "phase_seconds_total",
        "Time that the training loop spent in each phase, by the host's clock; the phases sum to the steps.",
        word=Word.DATA_WAIT_NS_TOTAL,
        phase=PHASES,
    )
    probe_ns_total: int = counter("profiler_overhead_seconds_total", word=Word.PROBE_NS_TOTAL, where="trainer")
    """The overhead of the probe in the steps: inside the taps, and the calls of the taps."""
    unobserved_steps: int = counter(
        "unobserved_steps_total",
        "Steps that were not observed, to stay within the budget; their phases are reported as equal to the others'.",
    )
    budget_ppm: int = gauge(
        "probe_budget_ratio",
        "Share of a step that the probe may take; above it, not all steps are observed. Absent: no limit.",
        known_by="budget_ppm",
    )
    """Allowed overhead as a share of a step, in millionths; above it, not all steps are observed. 0: no limit."""


@quantities
class GpuTime:
    """GPU time of the steps that were timed on the GPU."""

    forward_ns_total: int = counter(
        "phase_gpu_seconds_total",
        "GPU time of the phases, for the steps that were timed on the GPU.",
        phase="forward",
    )
    backward_ns_total: int = counter("phase_gpu_seconds_total", phase="backward")
    optimizer_ns_total: int = counter("phase_gpu_seconds_total", phase="optimizer")
    step_ns_total: int = counter()
    steps: int = counter("gpu_timed_steps_total", "Steps that were timed on the GPU; the others have less overhead.")


@quantities
class LoaderState:
    """The dataloader of a rank: its queue when the training loop last requested a batch, and the waits so far."""

    batches: int = counter("dataloader_batches_total", "Batches returned to the training loop.")
    eval_batches: int = counter(
        "dataloader_eval_batches_total", "Batches returned while gradients were disabled (validation)."
    )
    """Of `batches`."""
    batch_bytes_total: int = counter("dataloader_batch_bytes_total", "Bytes of the tensors in the returned batches.")
    wait_ns_total: int = counter()
    wait_counts: tuple[int, ...] = histogram(
        "dataloader_wait_seconds",
        "Time that the training loop waited for a batch.",
        word=Word.LOADER_WAIT_HISTOGRAM,
        buckets=STEP_BUCKETS,
        total="wait_ns_total",
    )
    transfer_ns_total: int = counter(
        "dataloader_transfer_seconds_total", "Waits for a batch that was ready: unpickling, mapping and pinning it."
    )
    blocked_ns_total: int = counter(
        "dataloader_reorder_blocked_seconds_total", "Waits for a batch while later ones were ready."
    )
    """Later batches were ready, but an earlier one was not (`in_order`)."""
    epochs: int = counter()
    """Whose first batch the training loop has waited for: observed in all steps, as an epoch begins."""
    first_wait_ns_total: int = counter()
    """These waits, and before them the creation of the iterator: workers that are not persistent start anew."""
    restarts: int = counter()
    """Of these epochs, those that started workers, but for the first one: what follows is about them."""
    shared_ns_total: int = counter()
    """How long the training thread was about the first batch, or the second (the longer one): it shares its memory with
    the new workers, and copies what it writes to."""
    shared_faults: int = counter()
    """How many page faults it had more about one of these than about the other."""
    ready: int = gauge(
        "dataloader_ready_batches",
        "Ready batches when the training loop last requested one; mostly 0 if the loader is too slow.",
    )
    outstanding: int = gauge(
        "dataloader_outstanding_batches", "Batches requested from the workers and not yet returned."
    )
    reorder_blocked: int = gauge(
        "dataloader_reorder_blocked_batches",
        "Finished batches that had to wait for an earlier one (see in_order of torch's DataLoader).",
    )
    pin_backlog: int = gauge(
        "dataloader_pin_backlog_batches", "Batches delivered by workers, but not yet by the pin-memory thread."
    )
    workers_configured: int = gauge("dataloader_workers", state="configured")


@table_row
class CopyTotals:
    """Copies in one direction, from or to one kind of host memory."""

    count: int = counter("copies_total", "Copies between CPU and GPU requested by the program.")
    size_bytes: int = counter("copy_bytes_total", "Bytes copied between CPU and GPU.")
    blocked_ns: int = counter(
        "copy_blocked_seconds_total", "Time that the program was blocked by copies between CPU and GPU."
    )
    gpu_ns: int = counter(
        "copy_gpu_seconds_total",
        "GPU time of copies between CPU and GPU, extrapolated from one of 16 steps.",
    )


@table_row
class SyncTotals:
    """Waits for the GPU by one operation."""

    calls: int = counter("sync_calls_total", "Calls that synchronize with the GPU.")
    blocked_ns: int = counter(
        "sync_blocked_seconds_total", "Time that the program was blocked in calls that synchronize with the GPU."
    )


@quantities
class Pauses:
    """Pauses of a program inside or outside its steps."""

    gc_collections: int = counter("gc_collections_total", "Runs of Python's garbage collector.")
    gc_ns_total: int = counter("gc_seconds_total", "Time in Python's garbage collector.")
    compiles: int = counter("compiles_total", "Compilations by torch.compile, including recompilations.")
    compile_ns_total: int = counter("compile_seconds_total", "Time in compilations by torch.compile.")
    comm_calls: int = counter("comm_calls_total", "Collective calls in which the training thread waited.")
    comm_blocked_ns_total: int = counter(
        "comm_blocked_seconds_total", "Time that the training thread waited in collective calls."
    )
    ddp_comm_ns: int = gauge(
        "ddp_comm_seconds",
        "Communication time of one step, as last logged by DistributedDataParallel.",
        known_by="ddp_comm_ns",
    )
    ddp_overlap_ns: int = gauge(
        "ddp_overlap_seconds",
        "The part of the communication time that overlapped with backward.",
        known_by="ddp_comm_ns",
    )


@quantities
class GpuMemory:
    """torch's caching allocator in one rank."""

    allocated_bytes: int = gauge(
        "gpu_memory_bytes",
        "Memory of torch's caching allocator on the rank's GPU; absent if the rank uses none.",
        state="allocated",
    )
    reserved_bytes: int = gauge("gpu_memory_bytes", state="reserved")
    peak_allocated_bytes: int = gauge("gpu_memory_bytes", state="peak_allocated")
    peak_reserved_bytes: int = gauge("gpu_memory_bytes", state="peak_reserved")
    active_bytes: int = gauge("gpu_memory_bytes", state="active")
    """Allocated, or free again and waiting for a stream to be done with it."""
    inactive_split_bytes: int = gauge("gpu_memory_bytes", state="inactive_split")
    """Free parts of blocks that are in use: they cannot be released, and larger requests do not fit."""
    alloc_retries: int = counter(
        "gpu_alloc_retries_total", "Allocations that succeeded only after all cached GPU memory was released."
    )
    ooms: int = counter("gpu_ooms_total", "Allocations of GPU memory that failed.")
    pinned_bytes: int = gauge("pinned_memory_bytes", "Pinned host memory held by torch.")
    """0 where this torch does not report it."""


@quantities
class CheckpointState:
    """The saves of a rank that uses gpulaunch.checkpoint."""

    saves: int = counter(
        "checkpoint_saves_total",
        "Checkpoints committed by gpulaunch.checkpoint, like all metrics with this prefix.",
    )
    failures: int = counter("checkpoint_failures_total", "Saves that failed; training continued.")
    stall_ns_total: int = counter(
        "checkpoint_stall_seconds_total",
        "Time that the training loop was blocked by saves; the phase checkpoint also includes other libraries.",
    )
    bytes_total: int = counter("checkpoint_bytes_total", "Bytes written by this rank to committed checkpoints.")
    step: int = gauge(
        "checkpoint_step",
        "Step of the newest committed checkpoint, in this attempt or an earlier one.",
        known_by="saves",
    )
    captured_ns: int = gauge()
    """CLOCK_MONOTONIC when the state in the newest one was taken; unknown while there are no saves."""
    resumed_step: int = gauge(
        "resumed_step", "The step that this rank resumed from in the current attempt.", known_by="resumed_step"
    )
    """The step that the current attempt resumed from; 0: from scratch."""
    last_stall_ns: int = gauge()
    blocking_since_ns: int = gauge()
    """CLOCK_MONOTONIC when the training thread entered the save that it is in; 0: it is in none."""


RECORDS: Final = (StepTotals, GpuTime, LoaderState, Pauses, GpuMemory, CheckpointState)
"""All of them that a segment has once."""

COPY_WORDS: Final = len(quantities_of(CopyTotals))
SYNC_WORDS: Final = len(quantities_of(SyncTotals))
LAYOUT: Final = layout_id((*RECORDS, CopyTotals, SyncTotals))
"""Differs if these declarations differ."""
