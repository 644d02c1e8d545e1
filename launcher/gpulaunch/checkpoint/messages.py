"""Exceptions raised to the program, and messages to its user. Standard library only."""

from __future__ import annotations

import os
import sys

REQUEUE = 75
"""EX_TEMPFAIL: there is a checkpoint, run again."""
IN_USE = 69
"""EX_UNAVAILABLE: temporary; `gpulaunch` exits with it if its job directory is locked."""
ENDED_BY_SIGTERM = 143


class CheckpointError(RuntimeError):
    """The program and `gpulaunch.checkpoint` do not fit together; the text says what to change."""


class DirectoryInUse(CheckpointError, SystemExit):  # noqa: N818 - an end, as Preempted is
    """Another live run saves in the directory. If not caught, it ends the program with exit code 69."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = IN_USE


class Preempted(SystemExit):
    """The job was asked to end. Code 75: there is a checkpoint to resume from; 143: there is none."""


def say(text: str) -> None:
    """Print one line to the user, on stderr."""
    if sys.stderr is not None:
        sys.stderr.write(f"[gpulaunch] {text}\n")
        sys.stderr.flush()


def why(error: BaseException, directory: str = "") -> str:
    """The cause of a failed save in a few words: the system's error, anywhere in the chain of exceptions.

    torch's own writer reports a short write as an error about positions; then a full disk is detected by looking.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno:
            return os.strerror(seen.errno)
        seen = seen.__cause__ or seen.__context__
    if directory and _is_full(directory):
        return f"{os.strerror(28)} ({first_line(error)})"
    return first_line(error)


def first_line(error: BaseException) -> str:
    """The exception as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _is_full(directory: str) -> bool:
    try:
        room = os.statvfs(directory)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < 1 << 20
