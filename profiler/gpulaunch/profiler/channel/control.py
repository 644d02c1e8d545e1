"""The control segment of a node: what the agent asks of its ranks, one question a load.

    word  what
    0     MAGIC
    1     VERSION
    2     PREEMPT         0, then 1: save at the next step boundary, then end
    3     SIGNUM          the signal that asked for it
    4     DEADLINE_NS     CLOCK_MONOTONIC when what still runs is killed
    5     SAVE_REQUESTS   how often a save was asked for: save at the next step boundary, and go on
    6     LEAVE           0, or 1: who gets a SIGTERM is to make place, and at once

The agent makes the file beside the ranks' segments and is its only writer; ranks map it read-only. All 4 KiB are
reserved when it is made and it is never cut, so a mapping cannot fault. Words are aligned native u64, each written by
one store.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from enum import IntEnum
from typing import Final

from gpulaunch.profiler.channel.mapping import make, map_checked

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
    LEAVE = 6


class ControlError(ValueError):
    """The file is not a control segment that this version can read or write; the text says why."""


def create(path: str) -> None:
    """Make a control segment that asks for nothing at `path`, replacing any older one.

    Whoever has the older one mapped keeps it: a rank of an older attempt does not hear what is said to the new one.

    Raises:
        OSError: it could not be made; ENOSPC when the tmpfs is full (here, and not as a SIGBUS in a rank later).
    """
    make(path, CONTROL_BYTES, (MAGIC, VERSION))


class ControlWriter:
    """The agent's end. Its methods are a few stores into memory."""

    def __init__(self, path: str) -> None:
        """Map the control segment at `path`.

        Raises:
            OSError: no such file, or no right to write it.
            ControlError: not a control segment of this version.
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

    def forget_saves(self) -> None:
        """Ask ranks that begin from here on for no save that was asked for before."""
        self._words[ControlWord.SAVE_REQUESTS] = 0

    def leave(self, leaves: bool) -> None:
        """Say that ranks which get a SIGTERM from here on are to make place, or that this is over."""
        self._words[ControlWord.LEAVE] = leaves

    def close(self) -> None:
        """Unmap the segment."""
        self._words.release()


class ControlReader:
    """A rank's end: what the agent asks. A segment that is missing or damaged asks for nothing; nothing is raised."""

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
    def leaves(self) -> bool:
        """Whether a SIGTERM means to make place at once."""
        return self._words[ControlWord.LEAVE] != 0

    @property
    def save_requests(self) -> int:
        """How often a save was asked for; one more than before: save at the next step boundary, and go on."""
        return self._words[ControlWord.SAVE_REQUESTS]

    def close(self) -> None:
        """Unmap the segment; from then on it asks for nothing."""
        self._words = bytes(len(ControlWord))


def _map(path: str, flags: int, protection: int) -> memoryview:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO in its place must not hold us
    try:
        mapped = map_checked(
            fd,
            path,
            protection,
            size_bytes=CONTROL_BYTES,
            magic=MAGIC,
            version=VERSION,
            what="control segment",
            error=ControlError,
        )
    finally:
        os.close(fd)
    return memoryview(mapped).cast("Q")
