"""Reads a rank's segment, whether the rank is alive, hung or killed, without help from its writer."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpulaunch.profiler.channel import clock
from gpulaunch.profiler.channel.declare import fields_of
from gpulaunch.profiler.channel.declare import read as read_record
from gpulaunch.profiler.channel.layout import (
    COPIES,
    MAGIC,
    REGION_BITS,
    RING_BYTE,
    SEGMENT_BYTES,
    SITE_BYTE,
    SITE_KINDS,
    SITE_ROW_BYTES,
    SITE_ROWS,
    SITE_TEXT_BYTE,
    SITE_TEXT_BYTES,
    SYNCS,
    TEXT_BYTES,
    Hook,
    Region,
    StepSource,
    TextSlot,
    Word,
)
from gpulaunch.profiler.channel.mapping import OpenFile
from gpulaunch.profiler.channel.quantities import (
    COPY_WORDS,
    SYNC_WORDS,
    CheckpointState,
    CopyTotals,
    GpuMemory,
    GpuTime,
    LoaderState,
    Pauses,
    StepTotals,
    SyncTotals,
)
from gpulaunch.profiler.channel.segment_writer import VERSION, SegmentError

_WORD: Final = struct.Struct("@Q")
_WORDS: Final = struct.Struct(f"@{RING_BYTE // 8}Q")
_SITE: Final = struct.Struct("@9Q")
_READ_TRIES: Final = 64  # a write takes about 2 us; more than a few tries mean that the writer died or sleeps in it


@dataclass(frozen=True, kw_only=True)
class Site:
    """What one line of the program has done so far."""

    kind: str
    """One of `layout.SITE_KINDS`."""
    text: str
    """`path:line function`; empty for all lines without a row of their own."""
    count: int
    size_bytes: int
    blocked_ns: int
    gpu_ns: int
    pinned: int
    """How many of `count` used pinned memory."""
    non_blocking: int


@dataclass(frozen=True, kw_only=True)
class SegmentSnapshot(StepTotals):
    """What a rank has published up to one instant: its steps in this attempt, and what else was measured."""

    rank: int
    local_rank: int
    attempt: int
    anchor: clock.Anchor
    """When the segment was made, on both clocks; see `clock.wall_ns`."""
    pid: int
    """The process that writes the segment; 0 until the rank has armed its probe."""
    armed: bool
    started_ns: int
    """CLOCK_MONOTONIC when the probe was armed."""
    hooks_armed: Hook
    hooks_unavailable: Hook
    consistent: bool
    """False if the writer stopped in the middle of publishing a step: its counters may then be one step apart."""
    steps_made: int
    """`steps`, plus those that have ended but whose times are not published yet."""
    last_step_monotonic_ns: int
    step_source: StepSource
    region: Region
    """Where the training thread is."""
    last_edge_ns: int
    """CLOCK_MONOTONIC when it got there; 0 before its first edge."""
    first_step_start_ns: int
    """CLOCK_MONOTONIC of the first edge; 0 before it."""
    first_step_end_ns: int
    """CLOCK_MONOTONIC when the first step was known to have ended; 0 before that."""
    loader: LoaderState
    gpu: GpuMemory
    gpu_time: GpuTime
    pauses: Pauses
    checkpoint: CheckpointState
    copies: Mapping[tuple[str, str], CopyTotals]
    """By direction and host memory, as in `layout.COPIES`."""
    syncs: Mapping[str, SyncTotals]
    """By `layout.SYNCS`."""
    listens: bool
    """Whether the rank will exit by itself after a preemption notice."""
    left_group_ns: int
    """CLOCK_MONOTONIC when it had destroyed its process groups; 0: it has not."""
    note: str
    fault: str


class SegmentReader:
    """Reads one segment again and again without opening it each time."""

    def __init__(self, path: str) -> None:
        """Open the segment at `path`.

        Raises:
            OSError: no such file, or no permission to read it.
            SegmentError: not a segment of this version.
        """
        self.path = path
        self._held = OpenFile(
            path, size_bytes=SEGMENT_BYTES, magic=MAGIC, version=VERSION, what="segment", error=SegmentError
        )

    def read(self) -> SegmentSnapshot:
        """The segment now.

        Raises:
            OSError, SegmentError: the file has changed since it was opened, e.g. was truncated.
        """
        self._held.check()
        words, consistent = self._stable_words()
        note = self._text(TextSlot.NOTE)
        fault = self._text(TextSlot.FAULT)
        return SegmentSnapshot(
            rank=words[Word.RANK],
            local_rank=words[Word.LOCAL_RANK],
            attempt=words[Word.ATTEMPT],
            anchor=clock.Anchor(
                monotonic_ns=words[Word.ANCHOR_MONOTONIC_NS], realtime_ns=words[Word.ANCHOR_REALTIME_NS]
            ),
            pid=words[Word.PID],
            armed=words[Word.PID] != 0,
            started_ns=words[Word.STARTED_NS],
            hooks_armed=Hook(words[Word.HOOKS_ARMED]),
            hooks_unavailable=Hook(words[Word.HOOKS_UNAVAILABLE]),
            consistent=consistent,
            **fields_of(StepTotals, words),
            steps_made=max(words[Word.STEPS], words[Word.STEPS_MADE]),
            last_step_monotonic_ns=words[Word.LAST_STEP_MONOTONIC_NS],
            step_source=StepSource(words[Word.STEP_SOURCE]),
            region=Region(words[Word.LAST_EDGE] & (1 << REGION_BITS) - 1),
            last_edge_ns=words[Word.LAST_EDGE] >> REGION_BITS,
            first_step_start_ns=words[Word.FIRST_STEP_START_NS],
            first_step_end_ns=words[Word.FIRST_STEP_END_NS],
            loader=read_record(LoaderState, words),
            gpu=read_record(GpuMemory, words),
            gpu_time=read_record(GpuTime, words),
            pauses=read_record(Pauses, words),
            checkpoint=read_record(CheckpointState, words),
            copies={
                key: read_record(CopyTotals, words, first=Word.COPY_FIRST + COPY_WORDS * row)
                for row, key in enumerate(COPIES)
            },
            syncs={
                key: read_record(SyncTotals, words, first=Word.SYNC_FIRST + SYNC_WORDS * row)
                for row, key in enumerate(SYNCS)
            },
            listens=bool(words[Word.LISTENS] & 1),
            left_group_ns=words[Word.LEFT_GROUP_NS],
            note=note,
            fault=fault,
        )

    def sites(self) -> tuple[Site, ...]:
        """The lines of the program that were observed to copy, wait and so on."""
        table = self._held.piece(SITE_BYTE, SITE_ROWS * SITE_ROW_BYTES)
        if table == _NO_SITES:  # most programs have few, many none, and this is read once a second for each rank
            return ()
        rows = (_site(table, row * SITE_ROW_BYTES) for row in range(SITE_ROWS))
        return tuple(row for row in rows if row is not None)

    def replaced(self) -> bool:
        """True if the path now has another segment (a new attempt has begun) or none (the job has ended)."""
        return self._held.replaced()

    def raw(self, offset: int, size: int) -> bytes:
        """Raw bytes of the segment."""
        return self._held.piece(offset, size)

    def word(self, index: int) -> int:
        """One u64 of the segment."""
        value: int = _WORD.unpack(self._held.piece(8 * index, 8))[0]
        return value

    def close(self) -> None:
        """Close the segment."""
        self._held.close()

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _stable_words(self) -> tuple[tuple[int, ...], bool]:
        """All words below the ring, and whether no step was being published meanwhile."""
        words: tuple[int, ...] = ()
        for _ in range(_READ_TRIES):
            closing = self.word(Word.CLOSING)
            words = _WORDS.unpack(self._held.piece(0, _WORDS.size))
            if self.word(Word.OPENING) == closing == words[Word.CLOSING]:
                return words, True
        return words, False

    def _text(self, slot: TextSlot) -> str:
        opening, closing = slot // 8, slot // 8 + 31
        for _ in range(_READ_TRIES):
            mark = self.word(closing)
            data = self.raw(slot + 16, min(self.word(opening + 1), TEXT_BYTES))
            if self.word(opening) == mark:
                return data.decode("utf-8", "ignore")  # "ignore": the cut at 232 bytes may split a character
        return ""


def read(path: str) -> SegmentSnapshot:
    """One snapshot of the segment at `path`.

    Raises:
        OSError: no such file, or no permission to read it.
        SegmentError: not a segment of this version.
    """
    with SegmentReader(path) as reader:
        return reader.read()


_NO_SITES: Final = bytes(SITE_ROWS * SITE_ROW_BYTES)


def _site(table: bytes, at: int) -> Site | None:
    if not any(table[at : at + 8]):
        return None
    mark, kind, count, size_bytes, blocked_ns, gpu_ns, pinned, non_blocking, length = _SITE.unpack_from(table, at)
    if not mark or kind >= len(SITE_KINDS):
        return None
    begin = at + SITE_TEXT_BYTE
    return Site(
        kind=SITE_KINDS[kind],
        text=table[begin : begin + min(length, SITE_TEXT_BYTES)].decode("utf-8", "ignore"),
        count=count,
        size_bytes=size_bytes,
        blocked_ns=blocked_ns,
        gpu_ns=gpu_ns,
        pinned=pinned,
        non_blocking=non_blocking,
    )
