"""The shared-memory segment of one rank: 64 KiB on tmpfs, one writer (the rank), any number of readers.

    byte      word      what
    0         0..15     identity: written by `segment.create` (agent) and once more when the rank claims the segment
    128       16..111   step counters, marks and times, one aligned native u64 each (`Word`); 40 is the training
                        thread's region
    896       112..127  step-duration histogram: one counter per bucket, the last one is +Inf
    1024      128..143  the same for the waits for a batch
    1280      160..191  text slot "note": the user's last note (`mark.note`)
    1536      192..223  text slot "fault": why a part of the probe is off
    1792      224..243  copies between CPU and GPU: count, bytes, blocked_ns, gpu_ns for each of COPIES (`CopyTotals`)
    1952      244..259  syncs: calls, blocked_ns for each of SYNCS (`SyncTotals`)
    2080      260..511  the other counters and gauges, as declared in `quantities`; unused ones are zero
    4096                ring: the last 192 steps, 128 bytes each, slot = step number % 192
    28672               sites: 96 rows of 256 bytes, one per line of the user's program that copies, waits, ...
    53248               unused, zero

Words are in native byte order: a segment never leaves its machine. Every counter only grows and has one writer, and an
aligned 8-byte store is atomic on x86-64 and aarch64, so a reader never sees half a number, not even after a SIGKILL.

Three items span several words and lie between two marks: the step counters (so that the phases of a snapshot sum to
its step total), a ring record, and a text slot. The writer stores the opening mark, the words, the closing mark, in
this order; the reader reads the closing mark, the words, the opening mark. If both marks are equal, nothing was
written meanwhile. A writer that died in the middle leaves them different: readers then take the counters as they are,
and skip the record or the text.

    step counters  OPENING  STEPS ... PROBE_NS_TOTAL  CLOSING             (mark: number of steps)
    ring record    +0 mark  +8 start_ns  +16 duration_ns  +24 one word for each phase but the last
                   +112 samples  +120 mark
                   (mark of step n: n + 1, 0 means never written; other_ns is the rest of duration_ns)
    text slot      +0 mark  +8 length in bytes  +16 UTF-8, at most 232 bytes  +248 mark
    site row       +0 mark (0: free; stored last)  +8 kind  +16 count  +24 bytes  +32 blocked_ns  +40 gpu_ns
                   +48 pinned  +56 non_blocking  +64 length in bytes  +72 UTF-8, at most 184 bytes
                   (rows are only added, and their counters only grow; row 0 counts all others once it is full; of small
                   collectives gpu_ns is the part of blocked_ns in calls that follow another one in the same step)

Any change here needs a new `VERSION`; readers reject any other, and other quantities (`quantities.LAYOUT`).
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final

SEGMENT_BYTES: Final = 65536
MAGIC: Final = int.from_bytes(b"gpulpage", "little")
VERSION: Final = 8

QUANTITIES_FIRST: Final = 260
QUANTITIES_END: Final = 512
"""The words of the quantities that need no particular place."""


class Word(IntEnum):
    """Index of each u64 in the segment; its byte offset is eight times that."""

    # identity
    MAGIC = 0
    VERSION = 1
    RANK = 2
    LOCAL_RANK = 3
    ATTEMPT = 4
    ANCHOR_MONOTONIC_NS = 5  # the same instant as the next word, on CLOCK_MONOTONIC
    ANCHOR_REALTIME_NS = 6
    PID = 7  # 0 until the probe of the rank has claimed the segment
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
    DATA_WAIT_NS_TOTAL = 22  # the phases, in the order of PHASES
    H2D_NS_TOTAL = 23
    FORWARD_NS_TOTAL = 24
    BACKWARD_NS_TOTAL = 25
    COMM_NS_TOTAL = 26
    OPTIMIZER_NS_TOTAL = 27
    SYNC_NS_TOTAL = 28
    CHECKPOINT_NS_TOTAL = 29
    COMPILE_NS_TOTAL = 30
    GC_NS_TOTAL = 31
    VALIDATION_NS_TOTAL = 32
    OTHER_NS_TOTAL = 33
    LAST_STEP_MONOTONIC_NS = 34
    STEP_SOURCE = 35
    PROBE_NS_TOTAL = 36
    CLOSING = 37

    # written at every edge of the training thread
    LAST_EDGE = 40  # CLOCK_MONOTONIC in ns << 3 | Region
    STEPS_MADE = 43  # steps ended, where the step counters lag (`probe.noted`); else less than STEPS

    # written once each; 0 until then
    FIRST_STEP_START_NS = 41
    FIRST_STEP_END_NS = 42

    # written by the code that saves and resumes (`probe.progress`)
    LISTENS = 101  # bit 0: exits by itself after a preemption notice

    # written by the tap of destroy_process_group (`probe.collectives`)
    LEFT_GROUP_NS = 102  # CLOCK_MONOTONIC when destroy_process_group() of all groups returned last; 0: never

    # STEP_BUCKETS words each; the first is written just before the step counters, so it is briefly some steps ahead
    STEP_HISTOGRAM = 112
    LOADER_WAIT_HISTOGRAM = 128

    COPY_FIRST = 224
    SYNC_FIRST = 244


def in_steps(word: Word) -> int:
    """Return the index of a word among the step counters, which begin with STEPS and are written together."""
    return word - Word.STEPS


STEP_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0)
"""Upper bounds of the step-duration buckets, inclusive; one more bucket holds longer steps."""

STEP_BOUNDS_NS: Final = tuple(round(bound_s * 1e9) for bound_s in STEP_BOUNDS_S)

STEP_BUCKETS: Final = len(STEP_BOUNDS_S) + 1

PHASES: Final = (
    *("data_wait", "h2d", "forward", "backward", "comm", "optimizer"),
    *("sync", "checkpoint", "compile", "gc", "validation", "other"),
)
"""The phases of a step; they sum to its duration. comm is communication that training waited for, not communication
that overlapped with it."""

COPIES: Final = (("h2d", "pageable"), ("h2d", "pinned"), ("d2h", "pageable"), ("d2h", "pinned"), ("d2d", ""))
"""Direction and kind of host memory of the copies that are counted separately."""

SYNCS: Final = ("item", "tolist", "numpy", "cpu", "bool", "nonzero", "synchronize", "other")
"""The operations by which the program waited for the GPU."""


class StepSource(IntEnum):
    """How the probe detects the end of a step."""

    NONE = 0
    OPTIMIZER = 1
    BACKWARD = 2
    DATALOADER = 3
    MARK = 4

    @classmethod
    def _missing_(cls, value: object) -> StepSource:  # noqa: ARG003 - the signature is the data model's
        return cls.NONE  # a damaged segment must not cost the reader the rest of it


class Region(IntEnum):
    """Where the training thread is: the last edge it passed."""

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
    """After an optimizer's step, the end of a dataloader, a mark: logging, say."""
    VALIDATION = 7
    """After a batch without gradients, until that dataloader ends."""

    @classmethod
    def _missing_(cls, value: object) -> Region:  # noqa: ARG003 - the signature is the data model's
        return cls.NONE  # a damaged segment must not cost the reader the rest of it


REGION_BITS: Final = 3
"""The low bits of LAST_EDGE that are the region."""


class Hook(IntFlag):
    """The parts of the probe that can be switched on or off separately."""

    DATALOADER = 1
    BACKWARD = 2
    OPTIMIZER = 4
    LOADER_QUEUE = 8
    SAMPLES = 16
    GPU_MEMORY = 32
    GPU_MEMORY_FRACTION = 64
    NESTED = 128
    """Garbage collection, compilation, checkpoints, collectives."""
    COPIES = 256
    SYNCS = 512
    WORKERS = 1024
    FACTS = 2048
    GPU_TIME = 4096


class TextSlot(IntEnum):
    """Byte offset of each text slot."""

    NOTE = 1280
    FAULT = 1536


TEXT_BYTES: Final = 232

RING_BYTE: Final = 4096
RING_RECORD_BYTES: Final = 128
RING_SLOTS: Final = 192

SITE_BYTE: Final = 28672
SITE_ROW_BYTES: Final = 256
SITE_ROWS: Final = 96
SITE_TEXT_BYTE: Final = 72
"""Where the text begins in its row."""
SITE_TEXT_BYTES: Final = 184
SITE_KINDS: Final = (
    *("elsewhere", "h2d", "d2h", "d2d", "item", "tolist", "numpy", "cpu", "bool", "nonzero", "synchronize"),
    *("built_on_cpu", "loader", "dataparallel", "save", "collective", "gc", "small_collective"),
)
"""What the line of a site row does; a row holds the index."""
