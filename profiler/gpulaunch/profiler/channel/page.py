"""A rank's page: made by the agent, written by the probe, read by anybody.

The layout is in `layout`; nothing else in the house knows an offset. Writing never blocks and never allocates: the
whole page is reserved when it is made. Reading needs no help from the writer, so it works on a live, a hung and a
killed rank alike.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpulaunch.profiler.channel import clock
from gpulaunch.profiler.channel.layout import (
    MAGIC,
    PAGE_BYTES,
    PHASES,
    REGION_BITS,
    RING_BYTE,
    RING_RECORD_BYTES,
    RING_SLOTS,
    STEP_BUCKETS,
    TEXT_BYTES,
    VERSION,
    Hook,
    Region,
    StepSource,
    TextSlot,
    Word,
)
from gpulaunch.profiler.channel.mapping import make, map_checked

__all__ = ["PageBusyError", "PageError", "PageReader", "PageSnapshot", "PageWriter", "create", "read"]


class PageError(ValueError):
    """The file is not a page that this version can read or write; the text says why."""


class PageBusyError(PageError):
    """Another live process is this page's writer."""


# Readers use struct in place. The writer never does: pack_into clears its target before it fills it, and a reader or a
# SIGKILL may come in between. An assignment to a word of a memoryview is one aligned 8-byte store; twenty of them are
# faster than to pack and to copy, too: between torch's kernels caches are cold, and this code is in use all the time.
_WORD: Final = struct.Struct("@Q")
_WORDS: Final = struct.Struct(f"@{RING_BYTE // 8}Q")

_OPENING: Final = int(Word.OPENING)
_CLOSING: Final = int(Word.CLOSING)
_QUEUE: Final = range(Word.LOADER_WORKERS_CONFIGURED, Word.LOADER_REORDER_BLOCKED + 1)
_HISTOGRAM: Final = int(Word.STEP_HISTOGRAM)

_READ_TRIES: Final = 64  # a writer is inside for about 2 us; more than a few tries mean that it died or sleeps in there
_RECORD_WORDS: Final = RING_RECORD_BYTES // 8
_U32: Final = (1 << 32) - 1


def create(path: str, *, rank: int, local_rank: int, attempt: int) -> None:
    """Make a zeroed page at `path`, replacing any older one.

    A replaced page stays whole for whoever has it mapped, so a rank of an older attempt cannot write into the new one.

    Raises:
        OSError: it could not be made; ENOSPC when the tmpfs is full (here, and not as a SIGBUS in the rank later).
    """
    at = clock.anchor()
    make(path, PAGE_BYTES, (MAGIC, VERSION, rank, local_rank, attempt, at.monotonic_ns, at.realtime_ns))


class PageWriter:
    """The one writer of a page. Every method is a few stores into memory; none raises once the page is open."""

    def __init__(self, path: str) -> None:
        """Claim the page for this process.

        Raises:
            OSError: no such file, or no right to write it.
            PageError: not a page of this version.
            PageBusyError: another live process writes it.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # A POSIX record lock belongs to the process: forked children do not hold it, the kernel drops it at death.
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PageBusyError(f"{path}: another process writes this page") from None
            self._map = _map(self._fd, path, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(self._fd)
            raise
        self._bytes = memoryview(self._map)
        self.words = self._bytes.cast("Q")
        """Every u64 of the page, to be indexed with `Word`; for single gauges and counters."""
        self._counters = self.words[Word.STEPS : Word.PROBE_NS_TOTAL + 1]
        self._ring = self.words[RING_BYTE // 8 :]
        if self.words[Word.PID]:
            # The rank is a script that runs several programs, and an earlier one wrote here: counters start again.
            cleared = 8 * Word.OPENING
            self._bytes[cleared:] = bytes(PAGE_BYTES - cleared)
            self.words[Word.HOOKS_ARMED] = self.words[Word.HOOKS_UNAVAILABLE] = 0
        self.words[Word.STARTED_NS] = clock.monotonic_ns()
        self.words[Word.PID] = os.getpid()

    def end_step(self, totals: Sequence[int], bucket: int, closed: int, record: Sequence[int]) -> None:
        """Publish the end of a step.

        Args:
            totals: new values of the words STEPS..PROBE_NS_TOTAL, in that order.
            bucket: index of the duration bucket that `closed` steps fall into.
            closed: how many steps ended, nearly always 1.
            record: the last of them: start_ns, duration_ns, data_wait_ns, forward_ns, backward_ns, optimizer_ns,
                samples.
        """
        words = self.words
        steps = totals[0]
        words[_HISTOGRAM + bucket] += closed
        words[_OPENING] = steps
        to = self._counters
        (to[0], to[1], to[2], to[3], to[4], to[5], to[6], to[7], to[8], to[9], to[10], to[11], to[12]) = totals
        words[_CLOSING] = steps

        to = self._ring
        at = (steps - 1) % RING_SLOTS * _RECORD_WORDS
        to[at] = steps
        to[at + 1], to[at + 2], to[at + 3], to[at + 4], to[at + 5], to[at + 6], samples = record
        to[at + 7] = (samples & _U32) << 32 | steps & _U32

    def write_queue(self, queue: Sequence[int]) -> None:
        """Put new values into the words LOADER_WORKERS_CONFIGURED..LOADER_REORDER_BLOCKED, in that order."""
        for word, value in zip(_QUEUE, queue, strict=True):
            self.words[word] = value

    def write_text(self, slot: TextSlot, text: str) -> None:
        """Put `text` into a slot, cut at 232 bytes."""
        data = text.encode("utf-8", "replace")[:TEXT_BYTES]
        opening, closing = slot // 8, slot // 8 + 31
        mark = self.words[opening] + 1
        self.words[opening] = mark
        self.words[opening + 1] = len(data)
        self._bytes[slot + 16 : slot + 16 + len(data)] = data
        self.words[closing] = mark

    def close(self) -> None:
        """Let the page go; another process may then claim it."""
        for view in (self._counters, self._ring, self.words, self._bytes):
            view.release()
        self._map.close()
        os.close(self._fd)


@dataclass(frozen=True, kw_only=True)
class PageSnapshot:
    """What a rank has published up to one instant."""

    rank: int
    local_rank: int
    attempt: int
    anchor: clock.Anchor
    """When the page was made, on both clocks; see `clock.wall_ns`."""
    pid: int
    """The process that writes the page; 0 until the rank has armed its probe."""
    armed: bool
    started_ns: int
    """CLOCK_MONOTONIC when the probe was armed."""
    hooks_armed: Hook
    hooks_unavailable: Hook
    consistent: bool
    """False if the writer stopped in the middle of publishing a step: its counters may then be one step apart."""
    steps: int
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
    gpu_allocated_bytes: int
    gpu_peak_allocated_bytes: int
    gpu_reserved_bytes: int
    checkpoint_saves: int
    """Checkpoints that this rank has committed."""
    checkpoint_failures: int
    checkpoint_stall_ns_total: int
    """How long the training thread stood still for saves."""
    checkpoint_last_stall_ns: int
    checkpoint_bytes_total: int
    checkpoint_step: int
    """Step of the newest one committed; means nothing while `checkpoint_saves` is 0."""
    checkpoint_captured_ns: int
    """CLOCK_MONOTONIC when the state in it was taken."""
    checkpoint_blocking_since_ns: int
    """CLOCK_MONOTONIC since when the training thread has been inside a save; 0: it is not."""
    resumed_step: int
    """The step that this rank went on from; 0: from nothing."""
    listens: bool
    """Whether the rank will end by itself after a preemption notice."""
    note: str
    fault: str


class PageReader:
    """Reads one page again and again without opening it each time."""

    def __init__(self, path: str) -> None:
        """Map the page at `path`.

        Raises:
            OSError: no such file, or no right to read it.
            PageError: not a page of this version.
        """
        self.path = path
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._inode = os.fstat(fd).st_ino
            self._map = _map(fd, path, mmap.PROT_READ)
        finally:
            os.close(fd)

    def read(self) -> PageSnapshot:
        """The page now."""
        words, consistent = self._stable_words()
        note = self._text(TextSlot.NOTE)
        fault = self._text(TextSlot.FAULT)
        return PageSnapshot(
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
            gpu_allocated_bytes=words[Word.GPU_ALLOCATED_BYTES],
            gpu_peak_allocated_bytes=words[Word.GPU_PEAK_ALLOCATED_BYTES],
            gpu_reserved_bytes=words[Word.GPU_RESERVED_BYTES],
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
            note=note,
            fault=fault,
        )

    def replaced(self) -> bool:
        """True if the path now has another page (a new attempt has begun) or none (the job has ended)."""
        try:
            return os.stat(self.path).st_ino != self._inode
        except FileNotFoundError:
            return True

    def raw(self, offset: int, size: int) -> bytes:
        """Bytes of the page, as they are."""
        return self._map[offset : offset + size]

    def word(self, index: int) -> int:
        """One u64 of the page."""
        value: int = _WORD.unpack_from(self._map, 8 * index)[0]
        return value

    def close(self) -> None:
        """Unmap the page."""
        self._map.close()

    def __enter__(self) -> PageReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _stable_words(self) -> tuple[tuple[int, ...], bool]:
        """All words below the ring, and whether no step was being published meanwhile."""
        words: tuple[int, ...] = ()
        for _ in range(_READ_TRIES):
            closing = self.word(Word.CLOSING)
            words = _WORDS.unpack_from(self._map, 0)
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


def read(path: str) -> PageSnapshot:
    """One snapshot of the page at `path`.

    Raises:
        OSError: no such file, or no right to read it.
        PageError: not a page of this version.
    """
    with PageReader(path) as reader:
        return reader.read()


def _map(fd: int, path: str, protection: int) -> mmap.mmap:
    return map_checked(
        fd, path, protection, size_bytes=PAGE_BYTES, magic=MAGIC, version=VERSION, what="page", error=PageError
    )
