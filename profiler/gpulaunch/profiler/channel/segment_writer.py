"""Creates and writes a rank's segment: the agent creates it, the probe fills it.

The layout is in `layout`; no other module knows an offset. Writing never blocks and never allocates: the whole
segment is reserved at creation.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Final

from gpulaunch.profiler.channel import clock, layout
from gpulaunch.profiler.channel.layout import (
    MAGIC,
    PHASES,
    RING_BYTE,
    RING_RECORD_BYTES,
    RING_SLOTS,
    SEGMENT_BYTES,
    SITE_BYTE,
    SITE_ROW_BYTES,
    SITE_ROWS,
    SITE_TEXT_BYTE,
    SITE_TEXT_BYTES,
    TEXT_BYTES,
    TextSlot,
    Word,
    in_steps,
)
from gpulaunch.profiler.channel.mapping import make, map_checked
from gpulaunch.profiler.channel.quantities import LAYOUT, LoaderState

VERSION: Final = layout.VERSION << 32 | LAYOUT
"""Of a segment: of its layout, and of the quantities in it."""


class SegmentError(ValueError):
    """The file is not a segment that this version can read or write; the message says why."""


class SegmentBusyError(SegmentError):
    """Another live process is this segment's writer."""


# The writer never packs: pack_into clears its target before it fills it, and a reader or a SIGKILL may come in between.
# An assignment to a word of a memoryview is one aligned 8-byte store. They are also faster than packing and copying:
# between torch's kernels caches are cold, and this code runs all the time.
_OPENING: Final = int(Word.OPENING)
_CLOSING: Final = int(Word.CLOSING)
_HISTOGRAM: Final = int(Word.STEP_HISTOGRAM)
_QUEUE: Final = (
    LoaderState.workers_configured,
    LoaderState.outstanding,
    LoaderState.ready,
    LoaderState.reorder_blocked,
    LoaderState.pin_backlog,
)
_COMMON_PHASES: Final = ("data_wait", "forward", "backward", "optimizer", "other")
_RARE_WORDS: Final = tuple(
    in_steps(Word.DATA_WAIT_NS_TOTAL) + at for at, phase in enumerate(PHASES) if phase not in _COMMON_PHASES
)
"""Of the step counters: phases that most steps lack."""
_COMMON_WORDS: Final = tuple(at for at in range(in_steps(Word.PROBE_NS_TOTAL) + 1) if at not in _RARE_WORDS)
_PLAIN_WORDS: Final = (*_COMMON_WORDS, in_steps(Word.COMM_NS_TOTAL))
_NOTHING: Final = memoryview(bytes(40)).cast("Q")  # for five words
_RECORD_WORDS: Final = RING_RECORD_BYTES // 8
_SITE_WORDS: Final = SITE_ROW_BYTES // 8


def create(path: str, *, rank: int, local_rank: int, attempt: int) -> None:
    """Create a zeroed segment at `path`, replacing any older one.

    Existing mappings keep the replaced segment, so a rank of an older attempt cannot write into the new one.

    Raises:
        OSError: it could not be created; ENOSPC when the tmpfs is full (here, and not as a SIGBUS in the rank later).
    """
    at = clock.anchor()
    make(path, SEGMENT_BYTES, (MAGIC, VERSION, rank, local_rank, attempt, at.monotonic_ns, at.realtime_ns))


class SegmentWriter:
    """The only writer of a segment. Every method is a few stores into memory; none raises once the segment is open."""

    def __init__(self, path: str) -> None:
        """Claim the segment for this process.

        Raises:
            OSError: no such file, or no permission to write it.
            SegmentError: not a segment of this version.
            SegmentBusyError: another live process writes it.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # A POSIX record lock belongs to the process: forked children do not hold it, the kernel drops it at exit.
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SegmentBusyError(f"{path}: another process writes this segment") from None
            self._map = map_segment(self._fd, path, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(self._fd)
            raise
        self._bytes = memoryview(self._map)
        self.words = self._bytes.cast("Q")
        """Every u64 of the segment, indexed by `Word`; for single gauges and counters."""
        self._counters = self.words[Word.STEPS : Word.PROBE_NS_TOTAL + 1]
        self._ring = self.words[RING_BYTE // 8 : SITE_BYTE // 8]
        self._sites = self.words[SITE_BYTE // 8 : SITE_BYTE // 8 + SITE_ROWS * _SITE_WORDS]
        self._rare_slots: set[int] = set()  # slots of the ring whose records have such a phase
        self._next_site = 1  # row 0 counts lines without a row of their own
        if self.words[Word.PID]:
            # The rank is a script that runs several programs, and an earlier one wrote here: reset the counters.
            cleared = 8 * Word.OPENING
            self._bytes[cleared:] = bytes(SEGMENT_BYTES - cleared)
            self.words[Word.HOOKS_ARMED] = self.words[Word.HOOKS_UNAVAILABLE] = 0
        self.words[Word.STARTED_NS] = clock.monotonic_ns()
        self.words[Word.PID] = os.getpid()

    def end_step(self, totals: Sequence[int], bucket: int, closed: int, record: Sequence[int]) -> None:
        """Publish the end of a step.

        Args:
            totals: new values of the words STEPS..PROBE_NS_TOTAL, in that order.
            bucket: index of the duration bucket that `closed` steps fall into.
            closed: how many steps ended, nearly always 1.
            record: the last of them: start_ns, duration_ns, each phase in ns but the last, samples.
        """
        words = self.words
        steps = totals[0]
        start, duration, wait, h2d, forward, backward, comm, optimizer, a, b, c, d, e, samples = record
        rare = h2d or comm or a or b or c or d or e
        words[_HISTOGRAM + bucket] += closed
        words[_OPENING] = steps
        to = self._counters
        if rare or closed > 1:
            for word in _RARE_WORDS:
                to[word] = totals[word]
        for word in _COMMON_WORDS:
            to[word] = totals[word]
        words[_CLOSING] = steps

        to = self._ring
        at = (steps - 1) % RING_SLOTS * _RECORD_WORDS
        to[at] = steps
        to[at + 1] = start
        to[at + 2] = duration
        to[at + 3] = wait
        to[at + 5] = forward
        to[at + 6] = backward
        to[at + 8] = optimizer
        if rare or at in self._rare_slots:
            self._rare_slots.add(at) if rare else self._rare_slots.discard(at)
            to[at + 4] = h2d
            to[at + 7] = comm
            to[at + 9], to[at + 10], to[at + 11], to[at + 12], to[at + 13] = a, b, c, d, e
        to[at + 14] = samples
        to[at + 15] = steps

    def end_plain_steps(self, totals: Sequence[int], buckets: Sequence[int], records: Sequence[Sequence[int]]) -> None:
        """Publish the end of several steps that have none of the rare phases but comm.

        Args:
            totals: as in `end_step`.
            buckets: of each step, the index of its duration bucket.
            records: of each step, as in `end_step`.
        """
        words = self.words
        steps = totals[0]
        ring, rare = self._ring, self._rare_slots
        for step, record in enumerate(records, steps - len(records) + 1):
            at = (step - 1) % RING_SLOTS * _RECORD_WORDS
            start, duration, wait, _, forward, backward, comm, optimizer, _, _, _, _, _, samples = record
            ring[at] = step
            ring[at + 1] = start
            ring[at + 2] = duration
            ring[at + 3] = wait
            ring[at + 5] = forward
            ring[at + 6] = backward
            ring[at + 8] = optimizer
            if comm or at in rare:
                rare.add(at) if comm else rare.discard(at)
                ring[at + 4] = 0
                ring[at + 7] = comm
                ring[at + 9 : at + 14] = _NOTHING
            ring[at + 14] = samples
            ring[at + 15] = step

        for bucket in buckets:
            words[_HISTOGRAM + bucket] += 1
        words[_OPENING] = steps
        to = self._counters
        for word in _PLAIN_WORDS:
            to[word] = totals[word]
        words[_CLOSING] = steps

    def write_queue(self, queue: Sequence[int]) -> None:
        """Write the loader's configured workers, and its batches: outstanding, ready, blocked by order, not pinned."""
        for word, value in zip(_QUEUE, queue, strict=True):
            self.words[word] = value

    def add_site(self, kind: int, text: str) -> int:
        """Return a new row for a line of the program, "path:line function"; row 0 (all others) if the table is full.

        The end of a long text tells lines apart, so the beginning is cut.
        """
        row = self._next_site
        if row >= SITE_ROWS:
            return 0
        self._next_site = row + 1
        data = text.encode("utf-8", "replace")[-SITE_TEXT_BYTES:]
        at, byte = row * _SITE_WORDS, SITE_BYTE + row * SITE_ROW_BYTES + SITE_TEXT_BYTE
        self._bytes[byte : byte + len(data)] = data
        self._sites[at + 8] = len(data)
        self._sites[at + 1] = kind
        self._sites[at] = 1
        return row

    def site(
        self,
        row: int,
        *,
        size_bytes: int = 0,
        blocked_ns: int = 0,
        gpu_ns: int = 0,
        pinned: int = 0,
        non_blocking: int = 0,
        count: int = 1,
    ) -> None:
        """Add to the counters of a row that `add_site` returned."""
        to, at = self._sites, row * _SITE_WORDS
        to[at + 2] += count
        to[at + 3] += size_bytes
        to[at + 4] += blocked_ns
        to[at + 5] += gpu_ns
        to[at + 6] += pinned
        to[at + 7] += non_blocking
        if not row:
            to[0] = 1

    def write_text(self, slot: TextSlot, text: str) -> None:
        """Write `text` into a slot, cut at 232 bytes."""
        data = text.encode("utf-8", "replace")[:TEXT_BYTES]
        opening, closing = slot // 8, slot // 8 + 31
        mark = self.words[opening] + 1
        self.words[opening] = mark
        self.words[opening + 1] = len(data)
        self._bytes[slot + 16 : slot + 16 + len(data)] = data
        self.words[closing] = mark

    def close(self) -> None:
        """Release the segment; another process may then claim it."""
        for view in (self._counters, self._ring, self._sites, self.words, self._bytes):
            view.release()
        self._map.close()
        os.close(self._fd)


def map_segment(fd: int, path: str, protection: int) -> mmap.mmap:
    """Map the open file `fd`. Raises OSError, or SegmentError if it is not a segment of this version."""
    return map_checked(
        fd, path, protection, size_bytes=SEGMENT_BYTES, magic=MAGIC, version=VERSION, what="segment", error=SegmentError
    )
