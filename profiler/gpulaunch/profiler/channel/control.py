"""The control page of a node: what the agent asks of its ranks, one question a load.

    word  what
    0     MAGIC
    1     VERSION
    2     PREEMPT         0, then 1: save at the next step boundary, then end
    3     SIGNUM          the signal that asked for it
    4     DEADLINE_NS     CLOCK_MONOTONIC when what still runs is killed
    5     SAVE_REQUESTS   how often a save was asked for: save at the next step boundary, and go on

The agent makes the file beside the ranks' pages and is its only writer; ranks map it read-only. All 4 KiB are reserved
when it is made and it is never cut, so a mapping cannot fault. Words are aligned native u64, each written by one store.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from enum import IntEnum
from typing import Final

__all__ = ["CONTROL_BYTES", "ControlError", "ControlReader", "ControlWord", "ControlWriter", "create"]

CONTROL_BYTES: Final = 4096
MAGIC: Final = int.from_bytes(b"gpulctrl", "little")
VERSION: Final = 1


class ControlWord(IntEnum):
    """Index of each u64; its byte offset is eight times that."""

    MAGIC = 0
    VERSION = 1
    PREEMPT = 2
    SIGNUM = 3
    DEADLINE_NS = 4
    SAVE_REQUESTS = 5


class ControlError(ValueError):
    """The file is not a control page that this version can read or write; the text says why."""


def create(path: str) -> None:
    """Make a control page that asks for nothing at `path`, replacing any older one.

    Whoever has the older one mapped keeps it: a rank of an older attempt does not hear what is said to the new one.

    Raises:
        OSError: it could not be made; ENOSPC when the tmpfs is full (here, and not as a SIGBUS in a rank later).
    """
    making = f"{path}.{os.getpid()}.new"
    fd = os.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, CONTROL_BYTES)
        os.pwrite(fd, struct.pack("@2Q", MAGIC, VERSION), 0)
        os.rename(making, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(making)
        raise
    finally:
        os.close(fd)


class ControlWriter:
    """The agent's end. Its methods are a few stores into memory."""

    def __init__(self, path: str) -> None:
        """Map the control page at `path`.

        Raises:
            OSError: no such file, or no right to write it.
            ControlError: not a control page of this version.
        """
        self._words = _map(path, os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE)

    def preempt(self, signum: int, deadline_ns: int) -> None:
        """Ask every rank to save and to end, before `deadline_ns` (CLOCK_MONOTONIC)."""
        self._words[ControlWord.SIGNUM] = signum
        self._words[ControlWord.DEADLINE_NS] = deadline_ns
        self._words[ControlWord.PREEMPT] = 1  # last: who sees it sees the others

    def request_save(self) -> None:
        """Ask every rank to save and to go on."""
        self._words[ControlWord.SAVE_REQUESTS] += 1

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()


class ControlReader:
    """A rank's end: what the agent asks. A page that is missing or damaged asks for nothing; nothing is raised."""

    def __init__(self, path: str) -> None:
        self._words: memoryview | bytes = bytes(len(ControlWord))
        with contextlib.suppress(OSError, ValueError):
            self._words = _map(path, os.O_RDONLY, mmap.PROT_READ)

    @property
    def preempted(self) -> bool:
        """Whether to save at the next step boundary, and then to end."""
        return self._words[ControlWord.PREEMPT] != 0

    @property
    def signum(self) -> int:
        """The signal that asked to end; 0: none."""
        return self._words[ControlWord.SIGNUM]

    @property
    def deadline_ns(self) -> int:
        """CLOCK_MONOTONIC when what still runs is killed; 0: not preempted."""
        return self._words[ControlWord.DEADLINE_NS]

    @property
    def save_requests(self) -> int:
        """How often a save was asked for; one more than before: save at the next step boundary, and go on."""
        return self._words[ControlWord.SAVE_REQUESTS]

    def close(self) -> None:
        """Unmap the page; from then on it asks for nothing."""
        self._words = bytes(len(ControlWord))


def _map(path: str, flags: int, protection: int) -> memoryview:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size != CONTROL_BYTES:
            raise ControlError(f"{path}: {size} bytes, a control page has {CONTROL_BYTES}")
        words = memoryview(mmap.mmap(fd, CONTROL_BYTES, mmap.MAP_SHARED, protection)).cast("Q")
    finally:
        os.close(fd)
    magic, version = words[ControlWord.MAGIC], words[ControlWord.VERSION]
    if (magic, version) == (MAGIC, VERSION):
        return words
    if magic != MAGIC:
        raise ControlError(f"{path}: not a gpulaunch control page")
    raise ControlError(f"{path}: control page version {version}, this gpulaunch knows version {VERSION}")
