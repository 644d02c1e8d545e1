"""Reads the ring of a rank's last steps, one record each; it outlives the rank, even after a SIGKILL.

The writer's side is `SegmentWriter.end_step`. A record's marks are its step's number, so the reader can tell a record
of this round from one of the previous round, and a complete one from one being written.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpulaunch.profiler.channel.layout import PHASES, RING_BYTE, RING_RECORD_BYTES, RING_SLOTS, Word
from gpulaunch.profiler.channel.segment import SegmentReader

_RECORD: Final = struct.Struct(f"@{RING_RECORD_BYTES // 8}Q")
_TRIES: Final = 8


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One finished step."""

    step: int
    """Counted from 0 over the attempt."""
    start_ns: int
    """CLOCK_MONOTONIC."""
    duration_ns: int
    phase_ns: Mapping[str, int]
    """By phase of `layout.PHASES`; they sum to `duration_ns`."""
    samples: int


def recent(path: str) -> list[StepEvent]:
    """The newest steps in the segment at `path` (at most 192), oldest first.

    Raises:
        OSError: no such file, or no permission to read it.
        SegmentError: not a segment of this version.
    """
    with SegmentReader(path) as reader:
        return recent_from(reader)


def recent_from(reader: SegmentReader) -> list[StepEvent]:
    """The newest steps of a mapped segment, oldest first; a step that is overwritten meanwhile is left out."""
    head = reader.word(Word.STEPS)
    events = (_event(reader, step) for step in range(max(0, head - RING_SLOTS), head))
    return [event for event in events if event is not None]


def _event(reader: SegmentReader, step: int) -> StepEvent | None:
    """The record of `step`, or None if it was never written, is overwritten, or is incomplete."""
    offset = RING_BYTE + (step % RING_SLOTS) * RING_RECORD_BYTES
    for _ in range(_TRIES):
        closing = reader.word((offset + RING_RECORD_BYTES) // 8 - 1)
        record = reader.raw(offset, RING_RECORD_BYTES)
        opening = reader.word(offset // 8)
        # The second copy is for CPUs that reorder stores (aarch64): a record being written differs between the two.
        if opening == closing and record == reader.raw(offset, RING_RECORD_BYTES):
            mark, start_ns, duration_ns, *rest, samples, _ = _RECORD.unpack(record)
            if mark != step + 1:
                return None
            phases = rest[: len(PHASES) - 1]
            return StepEvent(
                step=step,
                start_ns=start_ns,
                duration_ns=duration_ns,
                phase_ns=dict(zip(PHASES, (*phases, duration_ns - sum(phases)), strict=True)),
                samples=samples,
            )
    return None
