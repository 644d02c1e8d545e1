"""Reads a rank's segment, whether the rank is alive, hung or killed, without help from its writer."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpulaunch.profiler.channel import clock
from gpulaunch.profiler.channel.layout import (
    COPIES,
    COPY_WORDS,
    MAGIC,
    PHASES,
    REGION_BITS,
    RING_BYTE,
    SEGMENT_BYTES,
    SITE_BYTE,
    SITE_KINDS,
    SITE_ROW_BYTES,
    SITE_ROWS,
    SITE_TEXT_BYTE,
    SITE_TEXT_BYTES,
    STEP_BUCKETS,
    SYNC_WORDS,
    SYNCS,
    TEXT_BYTES,
    VERSION,
    Hook,
    Region,
    StepSource,
    TextSlot,
    Word,
)
from gpulaunch.profiler.channel.mapping import Held
from gpulaunch.profiler.channel.segment_writer import SegmentError

_WORD: Final = struct.Struct("@Q")
_WORDS: Final = struct.Struct(f"@{RING_BYTE // 8}Q")
_SITE: Final = struct.Struct("@9Q")
_HISTOGRAM: Final = int(Word.STEP_HISTOGRAM)
_WAITS: Final = int(Word.LOADER_WAIT_HISTOGRAM)
_READ_TRIES: Final = 64  # a write takes about 2 us; more than a few tries mean that the writer died or sleeps in it


@dataclass(frozen=True, kw_only=True)
class Copies:
    """What was copied in one direction, from or to one kind of host memory."""

    count: int
    size_bytes: int
    blocked_ns: int
    """How long the program was blocked on them."""
    gpu_ns: int
    """How long the GPU was copying: measured in one step of 16, times 16."""


@dataclass(frozen=True, kw_only=True)
class Syncs:
    """Waits for the GPU by one operation."""

    calls: int
    blocked_ns: int


@dataclass(frozen=True, kw_only=True)
class SiteRow:
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
class SegmentSnapshot:
    """What a rank has published up to one instant."""

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
    steps: int
    steps_made: int
    """The same, plus steps that have ended but whose times are not published yet."""
    microsteps: int
    skipped_steps: int
    samples: int
    step_ns_total: int
    step_histogram_counts: tuple[int, ...]
    """Steps per duration bucket (not cumulative); bounds in `layout.STEP_BOUNDS_S`, the last bucket is +Inf."""
    phase_ns: Mapping[str, int]
    """Total per phase of `layout.PHASES`; they sum to `step_ns_total`."""
    last_step_monotonic_ns: int
    step_source: StepSource
    probe_ns_total: int
    region: Region
    """Where the training thread is."""
    last_edge_ns: int
    """CLOCK_MONOTONIC when it got there; 0 before its first edge."""
    first_step_start_ns: int
    """CLOCK_MONOTONIC of the first edge; 0 before it."""
    first_step_end_ns: int
    """CLOCK_MONOTONIC when the first step was known to have ended; 0 before that."""
    loader_batches: int
    loader_workers_configured: int
    loader_outstanding: int
    loader_ready: int
    loader_reorder_blocked: int
    loader_pin_backlog: int
    loader_wait_ns_total: int
    loader_transfer_ns_total: int
    loader_blocked_ns_total: int
    loader_batch_bytes_total: int
    loader_eval_batches: int
    loader_wait_histogram_counts: tuple[int, ...]
    """Waits per duration bucket, as `step_histogram_counts`."""
    gc_collections: int
    gc_pause_ns_total: int
    compiles: int
    compile_pause_ns_total: int
    comm_calls: int
    comm_blocked_ns_total: int
    ddp_comm_ns: int
    ddp_overlap_ns: int
    gpu_allocated_bytes: int
    gpu_peak_allocated_bytes: int
    gpu_reserved_bytes: int
    gpu_peak_reserved_bytes: int
    gpu_active_bytes: int
    gpu_inactive_split_bytes: int
    gpu_alloc_retries: int
    gpu_ooms: int
    gpu_pinned_bytes: int
    gpu_timed_steps: int
    gpu_step_ns_total: int
    gpu_forward_ns_total: int
    gpu_backward_ns_total: int
    gpu_optimizer_ns_total: int
    copies: Mapping[tuple[str, str], Copies]
    """By direction and host memory, as in `layout.COPIES`."""
    syncs: Mapping[str, Syncs]
    """By `layout.SYNCS`."""
    checkpoint_saves: int
    """Checkpoints that this rank has committed."""
    checkpoint_failures: int
    checkpoint_stall_ns_total: int
    """How long the training thread was blocked by saves."""
    checkpoint_last_stall_ns: int
    checkpoint_bytes_total: int
    checkpoint_step: int
    """Step of the newest one committed; invalid while `checkpoint_saves` is 0."""
    checkpoint_captured_ns: int
    """CLOCK_MONOTONIC when the state in it was taken."""
    checkpoint_blocking_since_ns: int
    """CLOCK_MONOTONIC when the training thread entered the save that it is in; 0: it is in none."""
    resumed_step: int
    """The step that this rank resumed from; 0: from scratch."""
    listens: bool
    """Whether the rank will exit by itself after a preemption notice."""
    left_group_ns: int
    """CLOCK_MONOTONIC when it had destroyed its process groups; 0: it has not."""
    budget_ppm: int
    """Allowed overhead as a share of a step, in millionths; above it, parts are switched off. 0: no limit."""
    hooks_shed: Hook
    """The parts that were switched off for it."""
    unobserved_steps: int
    """Of `steps`: made without the probe, for comparison with the steps around them."""
    priced_pairs: int
    """Number of comparisons behind the next two; while it is 0, those are invalid."""
    paired_cost_ns: int
    """By how much steps with the probe are longer than those without: the median, which may be negative."""
    paired_error_ns: int
    """Standard error of that."""
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
        self._held = Held(
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
            steps=words[Word.STEPS],
            steps_made=max(words[Word.STEPS], words[Word.STEPS_MADE]),
            microsteps=words[Word.MICROSTEPS],
            skipped_steps=words[Word.SKIPPED_STEPS],
            samples=words[Word.SAMPLES],
            step_ns_total=words[Word.STEP_NS_TOTAL],
            step_histogram_counts=words[Word.STEP_HISTOGRAM : Word.STEP_HISTOGRAM + STEP_BUCKETS],
            phase_ns=dict(zip(PHASES, words[Word.DATA_WAIT_NS_TOTAL : Word.OTHER_NS_TOTAL + 1], strict=True)),
            last_step_monotonic_ns=words[Word.LAST_STEP_MONOTONIC_NS],
            step_source=StepSource(words[Word.STEP_SOURCE]),
            probe_ns_total=words[Word.PROBE_NS_TOTAL],
            region=Region(words[Word.LAST_EDGE] & (1 << REGION_BITS) - 1),
            last_edge_ns=words[Word.LAST_EDGE] >> REGION_BITS,
            first_step_start_ns=words[Word.FIRST_STEP_START_NS],
            first_step_end_ns=words[Word.FIRST_STEP_END_NS],
            loader_batches=words[Word.LOADER_BATCHES],
            loader_workers_configured=words[Word.LOADER_WORKERS_CONFIGURED],
            loader_outstanding=words[Word.LOADER_OUTSTANDING],
            loader_ready=words[Word.LOADER_READY],
            loader_reorder_blocked=words[Word.LOADER_REORDER_BLOCKED],
            loader_pin_backlog=words[Word.LOADER_PIN_BACKLOG],
            loader_wait_ns_total=words[Word.LOADER_WAIT_NS_TOTAL],
            loader_transfer_ns_total=words[Word.LOADER_TRANSFER_NS_TOTAL],
            loader_blocked_ns_total=words[Word.LOADER_BLOCKED_NS_TOTAL],
            loader_batch_bytes_total=words[Word.LOADER_BATCH_BYTES_TOTAL],
            loader_eval_batches=words[Word.LOADER_EVAL_BATCHES],
            loader_wait_histogram_counts=words[_WAITS : _WAITS + STEP_BUCKETS],
            gc_collections=words[Word.GC_COLLECTIONS],
            gc_pause_ns_total=words[Word.GC_PAUSE_NS_TOTAL],
            compiles=words[Word.COMPILES],
            compile_pause_ns_total=words[Word.COMPILE_PAUSE_NS_TOTAL],
            comm_calls=words[Word.COMM_CALLS],
            comm_blocked_ns_total=words[Word.COMM_BLOCKED_NS_TOTAL],
            ddp_comm_ns=words[Word.DDP_COMM_NS],
            ddp_overlap_ns=words[Word.DDP_OVERLAP_NS],
            gpu_allocated_bytes=words[Word.GPU_ALLOCATED_BYTES],
            gpu_peak_allocated_bytes=words[Word.GPU_PEAK_ALLOCATED_BYTES],
            gpu_reserved_bytes=words[Word.GPU_RESERVED_BYTES],
            gpu_peak_reserved_bytes=words[Word.GPU_PEAK_RESERVED_BYTES],
            gpu_active_bytes=words[Word.GPU_ACTIVE_BYTES],
            gpu_inactive_split_bytes=words[Word.GPU_INACTIVE_SPLIT_BYTES],
            gpu_alloc_retries=words[Word.GPU_ALLOC_RETRIES],
            gpu_ooms=words[Word.GPU_OOMS],
            gpu_pinned_bytes=words[Word.GPU_PINNED_BYTES],
            gpu_timed_steps=words[Word.GPU_TIMED_STEPS],
            gpu_step_ns_total=words[Word.GPU_STEP_NS_TOTAL],
            gpu_forward_ns_total=words[Word.GPU_FORWARD_NS_TOTAL],
            gpu_backward_ns_total=words[Word.GPU_BACKWARD_NS_TOTAL],
            gpu_optimizer_ns_total=words[Word.GPU_OPTIMIZER_NS_TOTAL],
            copies=_copies(words),
            syncs=_syncs(words),
            checkpoint_saves=words[Word.CHECKPOINT_SAVES],
            checkpoint_failures=words[Word.CHECKPOINT_FAILURES],
            checkpoint_stall_ns_total=words[Word.CHECKPOINT_STALL_NS_TOTAL],
            checkpoint_last_stall_ns=words[Word.CHECKPOINT_LAST_STALL_NS],
            checkpoint_bytes_total=words[Word.CHECKPOINT_BYTES_TOTAL],
            checkpoint_step=words[Word.CHECKPOINT_STEP],
            checkpoint_captured_ns=words[Word.CHECKPOINT_CAPTURED_NS],
            checkpoint_blocking_since_ns=words[Word.CHECKPOINT_BLOCKING_SINCE_NS],
            resumed_step=words[Word.RESUMED_STEP],
            listens=bool(words[Word.LISTENS] & 1),
            left_group_ns=words[Word.LEFT_GROUP_NS],
            budget_ppm=words[Word.BUDGET_PPM],
            hooks_shed=Hook(words[Word.HOOKS_SHED]),
            unobserved_steps=words[Word.UNOBSERVED_STEPS],
            priced_pairs=words[Word.PRICED_PAIRS],
            paired_cost_ns=_signed(words[Word.PAIRED_COST_NS]),
            paired_error_ns=words[Word.PAIRED_ERROR_NS],
            note=note,
            fault=fault,
        )

    def sites(self) -> tuple[SiteRow, ...]:
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


def _signed(word: int) -> int:
    """Decode a word that may hold a negative number (two's complement)."""
    return word - (1 << 64) if word >> 63 else word


def _site(table: bytes, at: int) -> SiteRow | None:
    if not any(table[at : at + 8]):
        return None
    mark, kind, count, size_bytes, blocked_ns, gpu_ns, pinned, non_blocking, length = _SITE.unpack_from(table, at)
    if not mark or kind >= len(SITE_KINDS):
        return None
    begin = at + SITE_TEXT_BYTE
    return SiteRow(
        kind=SITE_KINDS[kind],
        text=table[begin : begin + min(length, SITE_TEXT_BYTES)].decode("utf-8", "ignore"),
        count=count,
        size_bytes=size_bytes,
        blocked_ns=blocked_ns,
        gpu_ns=gpu_ns,
        pinned=pinned,
        non_blocking=non_blocking,
    )


def _copies(words: tuple[int, ...]) -> dict[tuple[str, str], Copies]:
    found: dict[tuple[str, str], Copies] = {}
    for index, key in enumerate(COPIES):
        at = Word.COPY_FIRST + index * COPY_WORDS
        count, size_bytes, blocked_ns, gpu_ns = words[at : at + COPY_WORDS]
        found[key] = Copies(count=count, size_bytes=size_bytes, blocked_ns=blocked_ns, gpu_ns=gpu_ns)
    return found


def _syncs(words: tuple[int, ...]) -> dict[str, Syncs]:
    found: dict[str, Syncs] = {}
    for index, key in enumerate(SYNCS):
        calls, blocked_ns = words[Word.SYNC_FIRST + index * SYNC_WORDS :][:SYNC_WORDS]
        found[key] = Syncs(calls=calls, blocked_ns=blocked_ns)
    return found
