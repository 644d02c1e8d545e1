"""The file of a rank's dataloader workers: where their time goes; 64 slots on tmpfs, one writer each, any reader.

    byte    what
    0       header: MAGIC, VERSION, MADE_NS (CLOCK_MONOTONIC), OWNER (pid of the rank; 0 until its probe is armed)
    256     slot 0, and so on every 256 bytes: PID, WORKER, KNOWS, then the counters of `COUNTERS`

The agent creates the file with the rank's segment. Workers are restarted with every epoch, so a slot belongs to the
process that holds the lock on its bytes: a worker takes the first free one and adds to the values there. A slot's
counters therefore only grow during the life of the file, and slots are taken from the front.

The lock is a POSIX record lock: the kernel drops it when the process ends, however it ends, and a forked child does not
hold it. It is also dropped when the process closes any descriptor of the file, so a claimed file stays open.

Words are aligned native u64; see `layout` for why a reader never sees half a number. No process maps this file: a fetch
is long enough for a system call, and a truncated file then loses values, where a mapping would kill its process.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from operator import add
from typing import Final

from gpulaunch.profiler.channel import clock
from gpulaunch.profiler.channel.mapping import OpenFile, check, make

SLOTS: Final = 64
_SLOT_BYTES: Final = 256
WORKERS_BYTES: Final = (1 + SLOTS) * _SLOT_BYTES
MAGIC: Final = int.from_bytes(b"gpulwork", "little")
VERSION: Final = 1

COUNTERS: Final = (
    "batches",
    "samples",
    "wall_ns",
    "cpu_ns",
    "runqueue_ns",
    "blocked_ns",
    "collate_ns",
    "storage_bytes",
    "cached_bytes",
)
"""The counters of a slot, in its order; each is explained at `WorkerSlot`."""

KNOWS_RUNQUEUE: Final = 1
"""Bit of KNOWS: the kernel reports how long this worker waited for a core."""
KNOWS_IO: Final = 2
"""Bit of KNOWS: the kernel reports what this worker read."""

_MADE_NS: Final = 2
_OWNER: Final = 3
_HEADER: Final = struct.Struct("@4Q")
_IDENTITY: Final = ("pid", "worker", "knows")
_SLOT: Final = struct.Struct(f"@{len(_IDENTITY) + len(COUNTERS)}Q")
_FIRST: Final = len(_IDENTITY)
_COUNTERS: Final = struct.Struct(f"@{len(COUNTERS)}Q")
_WORD: Final = struct.Struct("@Q")
_FLOCK: Final = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


class WorkersError(ValueError):
    """The file is not a workers file that this version can read or write; the message says why."""


def create(path: str) -> None:
    """Create a file with empty slots at `path`, replacing any older one; workers of an older attempt keep theirs.

    Raises:
        OSError: it could not be created; ENOSPC when the tmpfs is full (here, and not in a worker later).
    """
    make(path, WORKERS_BYTES, (MAGIC, VERSION, clock.monotonic_ns()))


def claim(path: str) -> None:
    """Mark this process as the rank: workers of other programs that it starts do not use the file.

    Raises:
        OSError, WorkersError: there is no such file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _check(fd, path)
        os.pwrite(fd, _WORD.pack(os.getpid()), _OWNER * _WORD.size)
    finally:
        os.close(fd)


class WorkersWriter:
    """A worker's side: one slot."""

    def __init__(self, path: str, *, parent_pid: int, worker: int, knows: int) -> None:
        """Take the first free slot.

        Args:
            path: the file.
            parent_pid: the process that started this worker.
            worker: its number in its dataloader.
            knows: KNOWS_RUNQUEUE and KNOWS_IO, where they apply.

        Raises:
            OSError: no such file, or no permission to write it.
            WorkersError: not a file of this version, or of another rank than `parent_pid`, or no slot is free.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _check(self._fd, path)
            self.slot = self._claim(path, parent_pid)
            begin = (1 + self.slot) * _SLOT_BYTES
            self._at = begin + _FIRST * _WORD.size
            self._counters = _COUNTERS.unpack(os.pread(self._fd, _COUNTERS.size, self._at))
            os.pwrite(self._fd, struct.pack("@2Q", worker, knows), begin + _WORD.size)
            os.pwrite(self._fd, _WORD.pack(os.getpid()), begin)  # last: readers use a slot once it has a pid
        except BaseException:
            os.close(self._fd)
            raise

    def _claim(self, path: str, parent_pid: int) -> int:
        owner = _HEADER.unpack(os.pread(self._fd, _HEADER.size, 0))[_OWNER]
        if owner != parent_pid:
            raise WorkersError(f"{path}: of process {owner}, this is a child of {parent_pid}")
        for slot in range(SLOTS):
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, _SLOT_BYTES, (1 + slot) * _SLOT_BYTES)
            except BlockingIOError:
                continue
            return slot
        raise WorkersError(f"{path}: all {SLOTS} slots are taken")

    def add(self, amounts: tuple[int, ...]) -> None:
        """Add to the counters, in the order of `COUNTERS`. Raises OSError if the file was truncated and cannot grow."""
        self._counters = tuple(map(add, self._counters, amounts))
        os.pwrite(self._fd, _COUNTERS.pack(*self._counters), self._at)


@dataclass(frozen=True, kw_only=True)
class WorkerSlot:
    """Totals of all workers that have used one slot. All times are within fetches: idle workers count nothing."""

    pid: int
    """Of the last worker that used it."""
    worker: int
    """Its number in its dataloader."""
    alive: bool
    knows_runqueue: bool
    """False: the wait for a core is in `blocked_ns`."""
    knows_io: bool
    batches: int
    samples: int
    wall_ns: int
    """The next three sum to it."""
    cpu_ns: int
    """On a core."""
    runqueue_ns: int
    """Ready to run, but no core was free."""
    blocked_ns: int
    """Waiting for anything else: storage, a network, a lock."""
    collate_ns: int
    """Of the wall time: making a batch of samples."""
    storage_bytes: int
    """Read from a device or a network file system."""
    cached_bytes: int
    """Read from memory: the page cache, pipes."""


class WorkersReader:
    """Reads one file again and again without opening it each time."""

    def __init__(self, path: str) -> None:
        """Open the file at `path`.

        Raises:
            OSError: no such file, or no permission to read it.
            WorkersError: not a file of this version.
        """
        self._held = OpenFile(
            path, size_bytes=WORKERS_BYTES, magic=MAGIC, version=VERSION, what="file of workers", error=WorkersError
        )
        try:
            self.made_ns: int = _HEADER.unpack(self._held.piece(0, _HEADER.size))[_MADE_NS]
            """CLOCK_MONOTONIC when the file was created; tells attempts apart."""
        except BaseException:
            self.close()
            raise

    def read(self) -> tuple[WorkerSlot, ...]:
        """Every slot that was ever taken.

        Raises:
            OSError, WorkersError: the file has changed since it was opened.
        """
        self._held.check()
        content = self._held.piece(0, WORKERS_BYTES)
        slots: list[WorkerSlot] = []
        for slot in range(SLOTS):
            pid, worker, knows, *counters = _SLOT.unpack_from(content, (1 + slot) * _SLOT_BYTES)
            if not pid:
                break  # slots are taken from the front
            slots.append(
                WorkerSlot(
                    pid=pid,
                    worker=worker,
                    alive=self._locked(slot),
                    knows_runqueue=bool(knows & KNOWS_RUNQUEUE),
                    knows_io=bool(knows & KNOWS_IO),
                    **dict(zip(COUNTERS, counters, strict=True)),
                )
            )
        return tuple(slots)

    def replaced(self) -> bool:
        """True if the path now has another file (a new attempt has begun) or none (the job has ended)."""
        return self._held.replaced()

    def close(self) -> None:
        """Close the file."""
        self._held.close()

    def __enter__(self) -> WorkersReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _locked(self, slot: int) -> bool:
        """Whether a process holds this slot; the kernel reports the lock that would conflict with ours."""
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, (1 + slot) * _SLOT_BYTES, _SLOT_BYTES, 0)
        found: int = _FLOCK.unpack(fcntl.fcntl(self._held.fd, fcntl.F_GETLK, wanted))[0]
        return found != fcntl.F_UNLCK


def read(path: str) -> tuple[WorkerSlot, ...]:
    """Every slot of the file at `path` that was ever taken.

    Raises:
        OSError: no such file, or no permission to read it.
        WorkersError: not a file of this version.
    """
    with WorkersReader(path) as reader:
        return reader.read()


def _check(fd: int, path: str) -> None:
    check(
        fd,
        path,
        size_bytes=WORKERS_BYTES,
        magic=MAGIC,
        version=VERSION,
        what="file of workers",
        error=WorkersError,
    )
