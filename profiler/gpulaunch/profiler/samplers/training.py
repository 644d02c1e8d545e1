"""Converts a rank's segment to a `TrainingState`: counters are totals over all attempts, gauges are copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from gpulaunch.profiler.channel import layout
from gpulaunch.profiler.channel.segment import SegmentSnapshot, SiteRow
from gpulaunch.profiler.record import (
    CheckpointState,
    CopyTotals,
    GpuMemory,
    GpuTime,
    LoaderState,
    Pauses,
    Price,
    Site,
    SyncTotals,
    TrainingState,
)

_GROWS: Final = (
    *("steps", "microsteps", "samples", "skipped_steps", "step_ns_total", "probe_ns_total"),
    *("loader_batches", "loader_eval_batches", "loader_batch_bytes_total"),
    *("loader_wait_ns_total", "loader_transfer_ns_total", "loader_blocked_ns_total"),
    *("gc_collections", "gc_pause_ns_total", "compiles", "compile_pause_ns_total"),
    *("comm_calls", "comm_blocked_ns_total"),
    *("gpu_alloc_retries", "gpu_ooms"),
    *("gpu_timed_steps", "gpu_step_ns_total"),
    *("gpu_forward_ns_total", "gpu_backward_ns_total", "gpu_optimizer_ns_total"),
    "unobserved_steps",
    *("checkpoint_saves", "checkpoint_failures", "checkpoint_stall_ns_total", "checkpoint_bytes_total"),
)
"""The single counters of a segment."""

WIDTH: Final = (
    len(_GROWS)
    + len(layout.PHASES)
    + 2 * layout.STEP_BUCKETS
    + layout.COPY_WORDS * len(layout.COPIES)
    + layout.SYNC_WORDS * len(layout.SYNCS)
)
"""How many counters a segment has."""


def counters(segment: SegmentSnapshot) -> tuple[int, ...]:
    """All counters of a segment, in the order in which `training` unpacks them."""
    return (
        *(getattr(segment, name) for name in _GROWS),
        *(segment.phase_ns[phase] for phase in layout.PHASES),
        *segment.step_histogram_counts,
        *segment.loader_wait_histogram_counts,
        *(n for c in segment.copies.values() for n in (c.count, c.size_bytes, c.blocked_ns, c.gpu_ns)),
        *(n for s in segment.syncs.values() for n in (s.calls, s.blocked_ns)),
    )


def training(
    rank: int,
    segment: SegmentSnapshot,
    totals: tuple[int, ...],
    *,
    sites: tuple[SiteRow, ...],
    facts: Mapping[str, Any],
    newest_checkpoint: tuple[int, int] | None,
) -> TrainingState:
    """Build the training state of a rank.

    Args:
        rank: its number.
        segment: its segment.
        totals: `counters` over all attempts.
        sites: the rows of its segment.
        facts: its facts about its environment.
        newest_checkpoint: when the state of its newest checkpoint was taken, and its step.
    """
    rest = iter(totals)
    total = dict(zip(_GROWS, rest, strict=False))
    phases = _take(rest, len(layout.PHASES))
    step_counts = _take(rest, layout.STEP_BUCKETS)
    wait_counts = _take(rest, layout.STEP_BUCKETS)
    copies = {key: _take(rest, layout.COPY_WORDS) for key in layout.COPIES}
    syncs = {key: _take(rest, layout.SYNC_WORDS) for key in layout.SYNCS}
    return TrainingState(
        rank=rank,
        armed=segment.armed,
        steps=total["steps"],
        microsteps=total["microsteps"],
        samples=total["samples"],
        skipped_steps=total["skipped_steps"],
        step_ns_total=total["step_ns_total"],
        step_bounds_s=layout.STEP_BOUNDS_S,
        step_counts=step_counts,
        phase_ns=dict(zip(layout.PHASES, phases, strict=True)),
        probe_ns_total=total["probe_ns_total"],
        step_source=segment.step_source.name.lower() if segment.step_source else None,
        last_step_monotonic_ns=segment.last_step_monotonic_ns or None,
        loader=_loader(segment, total, wait_counts),
        gpu=_gpu(segment, total),
        gpu_time=_gpu_time(total),
        checkpoint=_checkpoint(segment, total, newest_checkpoint),
        copies={
            key: CopyTotals(count=count, size_bytes=size_bytes, blocked_ns=blocked_ns, gpu_ns=gpu_ns)
            for key, (count, size_bytes, blocked_ns, gpu_ns) in copies.items()
            if count
        },
        syncs={
            key: SyncTotals(calls=calls, blocked_ns=blocked_ns) for key, (calls, blocked_ns) in syncs.items() if calls
        },
        sites=tuple(_site(row) for row in sites),
        pauses=Pauses(
            gc_collections=total["gc_collections"],
            gc_ns_total=total["gc_pause_ns_total"],
            compiles=total["compiles"],
            compile_ns_total=total["compile_pause_ns_total"],
            comm_calls=total["comm_calls"],
            comm_blocked_ns_total=total["comm_blocked_ns_total"],
            ddp_comm_ns=segment.ddp_comm_ns,
            ddp_overlap_ns=segment.ddp_overlap_ns,
        ),
        price=Price(
            budget_ratio=segment.budget_ppm / 1e6,
            hooks_shed=_names(segment.hooks_shed),
            unobserved_steps=total["unobserved_steps"],
            pairs=segment.priced_pairs,
            paired_cost_ns=segment.paired_cost_ns if segment.priced_pairs else None,
            paired_error_ns=segment.paired_error_ns if segment.priced_pairs else None,
        ),
        facts=facts,
        hooks_unavailable=_names(segment.hooks_unavailable),
        fault=segment.fault,
    )


def _names(hooks: layout.Hook) -> tuple[str, ...]:
    return tuple((hook.name or "").lower() for hook in layout.Hook if hook in hooks)


def _take(rest: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(islice(rest, count))


def _loader(segment: SegmentSnapshot, total: Mapping[str, int], wait_counts: tuple[int, ...]) -> LoaderState | None:
    if not (total["loader_batches"] or segment.loader_outstanding or segment.loader_workers_configured):
        return None
    return LoaderState(
        ready=segment.loader_ready,
        outstanding=segment.loader_outstanding,
        reorder_blocked=segment.loader_reorder_blocked,
        pin_backlog=segment.loader_pin_backlog,
        workers_configured=segment.loader_workers_configured,
        batches=total["loader_batches"],
        eval_batches=total["loader_eval_batches"],
        batch_bytes_total=total["loader_batch_bytes_total"],
        wait_ns_total=total["loader_wait_ns_total"],
        transfer_ns_total=total["loader_transfer_ns_total"],
        blocked_ns_total=total["loader_blocked_ns_total"],
        wait_counts=wait_counts,
    )


def _gpu(segment: SegmentSnapshot, total: Mapping[str, int]) -> GpuMemory | None:
    if not (segment.gpu_reserved_bytes or segment.gpu_allocated_bytes or segment.gpu_peak_allocated_bytes):
        return None
    return GpuMemory(
        allocated_bytes=segment.gpu_allocated_bytes,
        reserved_bytes=segment.gpu_reserved_bytes,
        peak_allocated_bytes=segment.gpu_peak_allocated_bytes,
        peak_reserved_bytes=segment.gpu_peak_reserved_bytes,
        active_bytes=segment.gpu_active_bytes,
        inactive_split_bytes=segment.gpu_inactive_split_bytes,
        alloc_retries=total["gpu_alloc_retries"],
        ooms=total["gpu_ooms"],
        pinned_bytes=segment.gpu_pinned_bytes,
    )


def _gpu_time(total: Mapping[str, int]) -> GpuTime | None:
    if not total["gpu_timed_steps"]:
        return None
    return GpuTime(
        steps=total["gpu_timed_steps"],
        step_ns_total=total["gpu_step_ns_total"],
        forward_ns_total=total["gpu_forward_ns_total"],
        backward_ns_total=total["gpu_backward_ns_total"],
        optimizer_ns_total=total["gpu_optimizer_ns_total"],
    )


def _checkpoint(
    segment: SegmentSnapshot, total: Mapping[str, int], newest: tuple[int, int] | None
) -> CheckpointState | None:
    told = any(total[name] for name in _GROWS if name.startswith("checkpoint_"))
    if not (segment.listens or segment.resumed_step or told):
        return None
    captured_ns, step = newest or (None, None)
    return CheckpointState(
        saves=total["checkpoint_saves"],
        failures=total["checkpoint_failures"],
        stall_ns_total=total["checkpoint_stall_ns_total"],
        bytes_total=total["checkpoint_bytes_total"],
        newest_step=step,
        captured_monotonic_ns=captured_ns,
        resumed_step=segment.resumed_step or None,
    )


def _site(row: SiteRow) -> Site:
    return Site(
        kind=row.kind,
        text=row.text,
        count=row.count,
        size_bytes=row.size_bytes,
        blocked_ns=row.blocked_ns,
        gpu_ns=row.gpu_ns,
        pinned=row.pinned,
        non_blocking=row.non_blocking,
    )
