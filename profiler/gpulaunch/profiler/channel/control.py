"""The control segment of a node: requests of the agent to its ranks, each read with one load.

    word  what
    0     MAGIC
    1     VERSION
    2     PREEMPT         0, then 1: save at the next step boundary, then end
    3     SIGNUM          the signal that asked for it
    4     DEADLINE_NS     CLOCK_MONOTONIC when processes still running are killed
    5     SAVE_REQUESTS   number of requested saves: save at the next step boundary, and continue
    6     LEAVE           0, or 1: a rank that gets a SIGTERM must exit at once to free its place

The agent creates the file beside the ranks' segments and is its only writer; ranks map it read-only. All 4 KiB are
reserved at creation and it is never truncated, so a mapping cannot fault. Words are aligned native u64, each written by
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
    """The file is not a control segment that this version can read or write; the message says why."""


def create(path: str) -> None:
    """Create a control segment without requests at `path`, replacing any older one.

    Existing mappings keep the older one: a rank of an older attempt does not see requests to the new one.

    Raises:
        OSError: it could not be created; ENOSPC when the tmpfs is full (here, and not as a SIGBUS in a rank later).
    """
    make(path, CONTROL_BYTES, (MAGIC, VERSION))


class ControlWriter:
    """The agent's side. Its methods are a few stores into memory."""

    def __init__(self, path: str) -> None:
        """Map the control segment at `path`.

        Raises:
            OSError: no such file, or no permission to write it.
            ControlError: not a control segment of this version.
        """
        self._words = _map(path, os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE)

    def preempt(self, signum: int, deadline_ns: int) -> None:
        """Ask every rank to save and exit before `deadline_ns` (CLOCK_MONOTONIC)."""
        self._words[ControlWord.SIGNUM] = signum
        self._words[ControlWord.DEADLINE_NS] = deadline_ns
        self._words[ControlWord.PREEMPT] = 1  # last: a reader that sees it sees the others

    def withdraw(self) -> None:
        """Take a request to save and exit back: the ranks that are started from now on have not been asked."""
        for word in (ControlWord.PREEMPT, ControlWord.SIGNUM, ControlWord.DEADLINE_NS):
            self._words[word] = 0

    def request_save(self) -> None:
        """Ask every rank to save and continue."""
        self._words[ControlWord.SAVE_REQUESTS] += 1

    def forget_saves(self) -> None:
        """Drop earlier save requests, so that ranks started from now on do not act on them."""
        self._words[ControlWord.SAVE_REQUESTS] = 0

    def leave(self, leaves: bool) -> None:
        """Set whether a rank that gets a SIGTERM from now on must exit at once to free its place."""
        self._words[ControlWord.LEAVE] = leaves

    def close(self) -> None:
        """Unmap the segment."""
        self._words.release()


class ControlReader:
    """A rank's side: the agent's requests. A missing or damaged segment reads as no request; no method raises."""

    def __init__(self, path: str) -> None:
        self._words: memoryview | bytes = bytes(len(ControlWord))
        with contextlib.suppress(OSError, ValueError):
            self._words = _map(path, os.O_RDONLY, mmap.PROT_READ)

    @property
    def preempted(self) -> bool:
        """Whether to save at the next step boundary and then exit."""
        return self._words[ControlWord.PREEMPT] != 0

    @property
    def signum(self) -> int:
        """The signal that asked for it; 0: none."""
        return self._words[ControlWord.SIGNUM]

    @property
    def deadline_ns(self) -> int:
        """CLOCK_MONOTONIC when processes still running are killed; 0: not preempted."""
        return self._words[ControlWord.DEADLINE_NS]

    @property
    def leaves(self) -> bool:
        """Whether a SIGTERM means to exit at once to free the place."""
        return self._words[ControlWord.LEAVE] != 0

    @property
    def save_requests(self) -> int:
        """Number of requested saves; when it has grown: save at the next step boundary, and continue."""
        return self._words[ControlWord.SAVE_REQUESTS]

    def close(self) -> None:
        """Unmap the segment; from then on it reads as no request."""
        self._words = bytes(len(ControlWord))


def _map(path: str, flags: int, protection: int) -> memoryview:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO in its place must not block us
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
