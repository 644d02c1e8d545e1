"""The shared-memory file of a rank's collectives: calls of its training thread, progress as torch reports it.

    word    what
    0       MAGIC, VERSION, ATTEMPT, PID, STARTED_NS (CLOCK_MONOTONIC)
    8       CALL        the last call: 1 + index of its kind in KINDS, << 1; and 1 while it is inside it
    9       RECORDER    what torch's flight recorder says: 0 nothing yet, 1 the next three, 2 it cannot be asked
    10      ENQUEUED    collectives started, in all process groups
    11      COMPLETED   collectives completed
    12      SEQUENCE    number of the last one started in the default process group
    16      one counter for each of KINDS: calls started

The rank creates the file, so a rank without torch has none; each program that runs in a rank creates its own. Words are
aligned native u64 with one writer, each written by one store; see `layout` for why a reader never sees half a number.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any, Final

from gpulaunch.profiler.channel import clock
from gpulaunch.profiler.channel.mapping import OpenFile, make, map_checked

COLLECTIVES_BYTES: Final = 4096
MAGIC: Final = int.from_bytes(b"gpulcoll", "little")
VERSION: Final = 1

KINDS: Final = (
    *("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather"),
    *("recv", "reduce", "reduce_scatter", "scatter", "send", "wait"),
)
"""What a call does; `wait` waits for one started before."""

CALL: Final = 8
RECORDER: Final = 9
ENQUEUED: Final = 10
COMPLETED: Final = 11
SEQUENCE: Final = 12
CALLS: Final = 16
READABLE: Final = 1
UNREADABLE: Final = 2

_WORDS: Final = struct.Struct(f"@{CALLS + len(KINDS)}Q")
_IDENTITY: Final = slice(2, 5)
_WHAT: Final[dict[str, Any]] = {
    "size_bytes": COLLECTIVES_BYTES,
    "magic": MAGIC,
    "version": VERSION,
    "what": "file of collectives",
}


class CollectivesError(ValueError):
    """The file is not a collectives file that this version can read; the message says why."""


def open_new(path: str, *, attempt: int) -> memoryview:
    """Create this process's file at `path`, replacing that of an earlier program; returns its words, writable.

    Raises:
        OSError: it could not be created; ENOSPC when the tmpfs is full (here, and not as a SIGBUS later).
    """
    make(path, COLLECTIVES_BYTES, (MAGIC, VERSION, attempt, os.getpid(), clock.monotonic_ns()))
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = map_checked(fd, path, mmap.PROT_READ | mmap.PROT_WRITE, **_WHAT, error=CollectivesError)
    finally:
        os.close(fd)
    return memoryview(mapped).cast("Q")


def words_of_call(kind: str) -> tuple[int, int, int]:
    """Return the index of a kind's counter, and the values of CALL during and after such a call."""
    index = KINDS.index(kind)
    returned = 1 + index << 1
    return CALLS + index, returned | 1, returned


@dataclass(frozen=True, kw_only=True)
class CollectivesSnapshot:
    """What a rank has published up to one instant."""

    attempt: int
    pid: int
    started_ns: int
    last: str | None
    """The kind of the last call; None before the first."""
    running: bool
    """Whether the training thread is inside it."""
    recorder: int
    """0, READABLE or UNREADABLE; the next three are valid only if it is READABLE."""
    enqueued: int
    completed: int
    sequence: int
    calls: tuple[int, ...]
    """Calls started, in the order of KINDS."""


class CollectivesReader:
    """Reads one file again and again without opening it each time."""

    def __init__(self, path: str) -> None:
        """Open the file at `path`.

        Raises:
            OSError: no such file, or no permission to read it.
            CollectivesError: not a file of this version.
        """
        self._held = OpenFile(path, **_WHAT, error=CollectivesError)

    def read(self) -> CollectivesSnapshot:
        """The file now.

        Raises:
            OSError, CollectivesError: the file has changed since it was opened.
        """
        self._held.check()
        words = _WORDS.unpack(self._held.piece(0, _WORDS.size))
        attempt, pid, started_ns = words[_IDENTITY]
        call = words[CALL]
        return CollectivesSnapshot(
            attempt=attempt,
            pid=pid,
            started_ns=started_ns,
            last=KINDS[(call >> 1) - 1] if 0 < call >> 1 <= len(KINDS) else None,
            running=bool(call & 1),
            recorder=words[RECORDER],
            enqueued=words[ENQUEUED],
            completed=words[COMPLETED],
            sequence=words[SEQUENCE],
            calls=words[CALLS:],
        )

    def replaced(self) -> bool:
        """True if the path now has another file (of another program, or attempt) or none (the job has ended)."""
        return self._held.replaced()

    def close(self) -> None:
        """Close the file."""
        self._held.close()

    def __enter__(self) -> CollectivesReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
