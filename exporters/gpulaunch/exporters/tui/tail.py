"""Reads the end of a rank's log: a bounded part, whatever its size and content."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulaunch.exporters.tui.text import plain, without_colours
from gpulaunch.profiler.redact import redact

STREAMS: Final = ("stderr", "stdout")
_READ_BYTES: Final = 64 * 1024
_LINES: Final = 1000
_LINE_CHARS: Final = 2000
_ENDS: Final = re.compile("\r?\n")


@dataclass(frozen=True, kw_only=True)
class LogPlace:
    """Identifies a log."""

    node: int
    attempt: int
    rank: int
    stream: str


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The end of a log."""

    place: LogPlace
    path: str
    lines: tuple[str, ...] = ()
    """Escaped, and without secrets; oldest first."""
    size_bytes: int = 0
    earlier: bool = False
    """Whether there are earlier lines."""
    trouble: str = ""
    """Why it could not be read."""


def read_tail(run_dir: Path, place: LogPlace) -> Tail:
    """Read the end of a log; never raises for its content. May block on the disk: not for the UI thread."""
    base = run_dir / f"node-{place.node}"
    if not place.node or not os.path.isdir(base):
        base = run_dir  # of node 0, or of another node's own directory
    path = base / "attempts" / str(place.attempt) / f"rank-{place.rank}" / f"{place.stream}.log"
    told = str(path.relative_to(run_dir))
    try:
        # Non-blocking: it may be a pipe that has no writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return Tail(place=place, path=told, trouble=_why(error, place))
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return Tail(place=place, path=told, trouble="it is no file")
        begin = max(0, status.st_size - _READ_BYTES)
        data = os.pread(fd, _READ_BYTES, begin)
    except OSError as error:
        return Tail(place=place, path=told, trouble=_why(error, place))
    finally:
        os.close(fd)
    lines = _ENDS.split(data.decode("utf-8", "replace"))
    if begin and len(lines) > 1:
        del lines[0]  # incomplete: it began before this part
    if lines and not lines[-1]:
        lines.pop()
    kept = lines[-_LINES:]
    return Tail(
        place=place,
        path=told,
        lines=tuple(_shown(each) for each in kept),
        size_bytes=status.st_size,
        earlier=bool(begin) or len(kept) < len(lines),
    )


def _shown(text: str) -> str:
    """Return a line as a terminal would show it: the last state of a progress bar, without colours, escaped, and
    without apparent secrets."""
    last = redact(without_colours(text).rstrip("\r").rpartition("\r")[2].expandtabs())
    cut = last[:_LINE_CHARS]
    return plain(cut) + (f" ... and {len(last) - len(cut)} characters more" if len(last) > len(cut) else "")


def _why(error: OSError, place: LogPlace) -> str:
    if isinstance(error, FileNotFoundError):
        there = f"rank {place.rank} in attempts/{place.attempt} has no {place.stream}.log here"
        return f"{there} (another node's disk, or the output went elsewhere)"
    return error.strerror or str(error)
