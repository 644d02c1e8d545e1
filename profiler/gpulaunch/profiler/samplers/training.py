"""Converts a rank's segment to a `TrainingState`: counters are totals over all attempts, gauges are copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from gpulaunch.profiler.channel import layout
from gpulaunch.profiler.channel.declare import counts, quantities_of, with_counts
from gpulaunch.profiler.channel.segment import SegmentSnapshot
from gpulaunch.profiler.record import CheckpointState, GpuMemory, LoaderState, Site, TrainingState

_RECORDS: Final = ("loader", "gpu", "gpu_time", "pauses", "checkpoint")
_RECORDS_BY_KIND: Final = ("copies", "syncs")
"""The parts of a segment that have counters, besides the segment itself."""


def counters(segment: SegmentSnapshot) -> tuple[int, ...]:
    """Return all counters of a segment, in the order in which `with_totals` takes them."""
    records = [segment, *(getattr(segment, name) for name in _RECORDS)]
    for name in _RECORDS_BY_KIND:
        records += getattr(segment, name).values()
    return tuple(count for record in records for count in counts(record))


def with_totals(segment: SegmentSnapshot, totals: tuple[int, ...]) -> SegmentSnapshot:
    """Return the segment with other values of its counters."""
    rest = iter(totals)
    total = with_counts(segment, rest)
    changed: dict[str, Any] = {name: with_counts(getattr(segment, name), rest) for name in _RECORDS}
    for name in _RECORDS_BY_KIND:
        changed[name] = {kind: with_counts(record, rest) for kind, record in getattr(segment, name).items()}
    return replace(total, **changed)


def training(
    rank: int,
    segment: SegmentSnapshot,
    totals: tuple[int, ...],
    *,
    sites: tuple[Site, ...],
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
    total = with_totals(segment, totals)
    return TrainingState(
        **{each.name: getattr(total, each.name) for each in quantities_of(total)},
        rank=rank,
        armed=segment.armed,
        step_bounds_s=layout.STEP_BOUNDS_S,
        step_source=segment.step_source.name.lower() if segment.step_source else None,
        last_step_monotonic_ns=segment.last_step_monotonic_ns or None,
        loader=total.loader if _has_loader(total.loader) else None,
        gpu=total.gpu if _has_memory(total.gpu) else None,
        gpu_time=total.gpu_time if total.gpu_time.steps else None,
        checkpoint=_checkpoint(total, newest_checkpoint),
        copies={key: copies for key, copies in total.copies.items() if copies.count},
        syncs={key: syncs for key, syncs in total.syncs.items() if syncs.calls},
        sites=sites,
        pauses=total.pauses,
        facts=facts,
        hooks_unavailable=_names(segment.hooks_unavailable),
        fault=segment.fault,
    )


def _names(hooks: layout.Hook) -> tuple[str, ...]:
    return tuple((hook.name or "").lower() for hook in layout.Hook if hook in hooks)


def _has_loader(loader: LoaderState) -> bool:
    return bool(loader.batches or loader.outstanding or loader.workers_configured)


def _has_memory(gpu: GpuMemory) -> bool:
    return bool(gpu.reserved_bytes or gpu.allocated_bytes or gpu.peak_allocated_bytes)


def _checkpoint(total: SegmentSnapshot, newest: tuple[int, int] | None) -> CheckpointState | None:
    """Return the saves of a rank, with its newest checkpoint of all attempts."""
    checkpoint = total.checkpoint
    if not (total.listens or checkpoint.resumed_step or any(counts(checkpoint))):
        return None
    captured_ns, step = newest or (0, 0)
    return replace(checkpoint, captured_ns=captured_ns, step=step)
