"""The shared-memory page of one rank: 16 KiB on tmpfs, one writer (the rank), any number of readers.

    byte      word      what
    0         0..15     identity: written by `page.create` (agent) and once more when the rank claims the page
    128       16..95    counters and gauges, one aligned native u64 each (`Word`); 31 is where the training thread is
    768       96..127   step-duration histogram: one counter per bucket, the last one is +Inf, then room to grow
    1024      128..159  text slot "note": what the user said last (`mark.note`)
    1280      160..191  text slot "fault": why a part of the probe is off
    1536      192..511  unused, zero
    4096      512..2047 ring: the last 192 steps, 64 bytes each, slot = step number % 192

Words are in native byte order: a page never leaves its machine. Every counter only grows and has one writer, and an
aligned 8-byte store is one move on x86-64 and aarch64, so a reader never sees half a number, not even after a SIGKILL.

Three things span several words and lie between two marks: the step counters (so that the phases of a snapshot sum to
its step total), a ring record, and a text slot. The writer stores the opening mark, the words, the closing mark, in
this order; the reader takes the closing mark, the words, the opening mark. If both marks are the same number, nothing
was written meanwhile. A writer that died in the middle leaves them different for ever: readers then take the counters
as they are, and skip the record or the text.

    step counters  OPENING  STEPS ... PROBE_NS_TOTAL  CLOSING             (mark: number of steps)
    ring record    +0 mark  +8 start_ns  +16 duration_ns  +24 data_wait_ns  +32 forward_ns  +40 backward_ns
                   +48 optimizer_ns  +56 samples << 32 | mark & 0xffffffff
                   (mark of step n: n + 1, 0 means never written; other_ns is the rest of duration_ns)
    text slot      +0 mark  +8 length in bytes  +16 UTF-8, at most 232 bytes  +248 mark

A change to anything here is a new `VERSION`; readers refuse any other.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final

__all__ = [
    "MAGIC",
    "PAGE_BYTES",
    "PHASES",
    "REGION_BITS",
    "RING_BYTE",
    "RING_RECORD_BYTES",
    "RING_SLOTS",
    "STEP_BOUNDS_NS",
    "STEP_BOUNDS_S",
    "STEP_BUCKETS",
    "TEXT_BYTES",
    "VERSION",
    "Hook",
    "Region",
    "StepSource",
    "TextSlot",
    "Word",
]

PAGE_BYTES: Final = 16384
MAGIC: Final = int.from_bytes(b"gpulpage", "little")
VERSION: Final = 2


class Word(IntEnum):
    """Index of each u64 in the page; its byte offset is eight times that."""

    # identity
    MAGIC = 0
    VERSION = 1
    RANK = 2
    LOCAL_RANK = 3
    ATTEMPT = 4
    ANCHOR_MONOTONIC_NS = 5  # the same instant as the next word, on the other clock
    ANCHOR_REALTIME_NS = 6
    PID = 7  # 0 until the probe of the rank has claimed the page
    STARTED_NS = 8  # CLOCK_MONOTONIC when it did
    HOOKS_ARMED = 9  # bits of Hook
    HOOKS_UNAVAILABLE = 10  # bits of Hook that could not be placed, or were taken out after a fault

    # written together at the end of a step
    OPENING = 16
    STEPS = 17  # also the head of the ring
    MICROSTEPS = 18
    SKIPPED_STEPS = 19
    SAMPLES = 20
    STEP_NS_TOTAL = 21
    DATA_WAIT_NS_TOTAL = 22
    FORWARD_NS_TOTAL = 23
    BACKWARD_NS_TOTAL = 24
    OPTIMIZER_NS_TOTAL = 25
    OTHER_NS_TOTAL = 26
    LAST_STEP_MONOTONIC_NS = 27
    STEP_SOURCE = 28
    PROBE_NS_TOTAL = 29
    CLOSING = 30

    # written at every edge that the training thread passes
    LAST_EDGE = 31  # CLOCK_MONOTONIC in ns << 3 | Region

    # written once each; 0 until then
    FIRST_STEP_START_NS = 32
    FIRST_STEP_END_NS = 33

    # written whenever a batch is asked for or handed out
    LOADER_BATCHES = 40
    LOADER_WORKERS_CONFIGURED = 41
    LOADER_OUTSTANDING = 42
    LOADER_READY = 43
    LOADER_REORDER_BLOCKED = 44

    # written at most once a second
    GPU_ALLOCATED_BYTES = 56
    GPU_PEAK_ALLOCATED_BYTES = 57
    GPU_RESERVED_BYTES = 58

    # written by whoever saves and resumes (`probe.progress`)
    CHECKPOINT_SAVES = 64  # committed
    CHECKPOINT_FAILURES = 65
    CHECKPOINT_STALL_NS_TOTAL = 66
    CHECKPOINT_LAST_STALL_NS = 67
    CHECKPOINT_BYTES_TOTAL = 68
    CHECKPOINT_STEP = 69  # of the newest one committed; means nothing before the first
    CHECKPOINT_CAPTURED_NS = 70  # CLOCK_MONOTONIC when its state was taken
    CHECKPOINT_BLOCKING_SINCE_NS = 71  # since when the training thread has been inside a save; 0: it is not
    RESUMED_STEP = 72  # 0: from nothing
    LISTENS = 73  # bit 0: ends by itself after a preemption notice

    # STEP_BUCKETS words; written just before the step counters, so for a microsecond one step ahead of them
    STEP_HISTOGRAM = 96


STEP_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0)
"""Upper bounds of the step-duration buckets, inclusive; one more bucket takes what is longer."""

STEP_BOUNDS_NS: Final = tuple(round(bound_s * 1e9) for bound_s in STEP_BOUNDS_S)

STEP_BUCKETS: Final = len(STEP_BOUNDS_S) + 1

PHASES: Final = ("data_wait", "forward", "backward", "optimizer", "other")
"""Where the time of a step went; the parts sum to the step."""


class StepSource(IntEnum):
    """What tells the probe that a step has ended."""

    NONE = 0
    OPTIMIZER = 1
    BACKWARD = 2
    DATALOADER = 3
    MARK = 4

    @classmethod
    def _missing_(cls, value: object) -> StepSource:  # noqa: ARG003 - the signature is the data model's
        return cls.NONE  # a damaged page must not cost the reader the rest of it


class Region(IntEnum):
    """Where the training thread is: what it has passed last."""

    NONE = 0
    """No edge yet."""
    LOADER = 1
    """Inside a dataloader's `next`."""
    FORWARD = 2
    """After a batch for training."""
    BACKWARD = 3
    """Inside autograd."""
    STEPPING = 4
    """After a backward, before the optimizer: gradient clipping, the next micro-step."""
    OPTIMIZER = 5
    """Inside an optimizer's step."""
    OTHER = 6
    """After an optimizer's step, the end of a dataloader, a batch without gradients, a mark: logging, validation."""

    @classmethod
    def _missing_(cls, value: object) -> Region:  # noqa: ARG003 - the signature is the data model's
        return cls.NONE  # a damaged page must not cost the reader the rest of it


REGION_BITS: Final = 3
"""The low bits of LAST_EDGE that are the region."""


class Hook(IntFlag):
    """The parts of the probe that can be on or off one by one."""

    DATALOADER = 1
    BACKWARD = 2
    OPTIMIZER = 4
    LOADER_QUEUE = 8
    SAMPLES = 16
    GPU_MEMORY = 32
    GPU_MEMORY_FRACTION = 64


class TextSlot(IntEnum):
    """Byte offset of each text slot."""

    NOTE = 1024
    FAULT = 1280


TEXT_BYTES: Final = 232

RING_BYTE: Final = 4096
RING_RECORD_BYTES: Final = 64
RING_SLOTS: Final = 192
