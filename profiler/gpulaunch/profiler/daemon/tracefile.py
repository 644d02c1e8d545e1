"""Finds and parses a trace file written by Kineto: its path, whether it is complete, what it contains."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MOST_BYTES: Final = 256 << 20
"""Of a larger one only the end is read: reading it whole takes as much memory beside the training."""
_END_BYTES: Final = 4096
_END: Final = re.compile(rb"\][^\[\]{}]*\}\s*\Z")
"""After the last event there are a name and a time, and no further list or object."""


_COPY: Final = re.compile("Memcpy (HtoD|DtoH|DtoD)")
_DIRECTIONS: Final = {"HtoD": "h2d", "DtoH": "d2h", "DtoD": "d2d"}


class TraceFileError(ValueError):
    """This is not a complete trace; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What is in a trace."""

    num_events: int
    """Events that have a duration."""
    copied_bytes: Mapping[str, int]
    """What the GPU copied, by direction (h2d, d2h, d2d); only those that occurred."""


def part_name(rank: int) -> str:
    """The file name ordered for a rank's trace; Kineto writes `rank-0.part_<pid>.json.tmp`, then renames it."""
    return f"rank-{rank}.part.json"


class TraceFileWatch:
    """The trace that a rank writes into a directory; older versions of Kineto write it under its final name."""

    def __init__(self, directory: str, rank: int) -> None:
        self._directory = directory
        self._prefix = f"rank-{rank}.part_"
        self._told = False
        self.path = ""
        """"" until it was created."""
        self.size_bytes = 0
        """As of the last `look`."""

    def look(self) -> bool:
        """Whether it seems complete: it has its final name, has stopped growing, and ends as a trace ends.

        True once per size: a caller that then finds it incomplete waits for it to grow. Raises OSError.
        """
        before = self.path, self.size_bytes
        self.path = self._find()
        try:
            self.size_bytes = os.stat(self.path).st_size if self.path else 0
        except FileNotFoundError:  # it has just got its final name
            return False
        if (self.path, self.size_bytes) != before:
            self._told = False
        elif self.path.endswith(".json") and not self._told and _END.search(_last_bytes(self.path)):
            self._told = True
            return True
        return False

    def _find(self) -> str:
        """Its path, under its final name if it has that already."""
        names = (name for name in os.listdir(self._directory) if name.startswith(self._prefix))
        found = sorted((name for name in names if name.endswith((".json", ".json.tmp"))), key=len)
        return os.path.join(self._directory, found[0]) if found else ""


def contents_of(path: str) -> Contents | None:
    """Read a trace; None for one that is too large to be read as a whole.

    Raises:
        TraceFileError: it is not a trace, or only the beginning of one.
        OSError: it cannot be read.
    """
    if os.stat(path).st_size > MOST_BYTES:
        if not _END.search(_last_bytes(path)):
            raise TraceFileError("it has no end")
        return None
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            # Not strict: names of kernels and ranges may hold any character.
            events: Any = json.loads(file.read(), strict=False, object_pairs_hook=_shrunk)
    except (ValueError, RecursionError) as error:
        raise TraceFileError(f"it is no JSON: {error}") from None
    if not isinstance(events, list):
        raise TraceFileError("it has no list of events")
    copied_bytes: dict[str, int] = {}
    for event in events:
        if isinstance(event, _Copy):
            copied_bytes[event.direction] = copied_bytes.get(event.direction, 0) + event.size_bytes
    return Contents(num_events=sum(event is not None for event in events), copied_bytes=copied_bytes)


@dataclass(frozen=True)
class _Copy:
    direction: str
    size_bytes: int


def _shrunk(pairs: list[tuple[str, Any]]) -> Any:
    """Keep of each object only what is needed: of the trace its events, of an event that it has a duration.

    As objects, the events of a trace of 256 MB would take gigabytes.
    """
    if ("ph", "X") in pairs:
        if ("cat", "Trace") in pairs:  # the window itself
            return None
        return _copy(dict(pairs)) if ("cat", "gpu_memcpy") in pairs else True
    for key, value in pairs:
        if key in ("traceEvents", "bytes"):  # of a trace; of the arguments of a copy
            return value
    return None


def _copy(event: dict[str, Any]) -> _Copy | bool:
    """A copy by the GPU: `Memcpy HtoD (Pageable -> Device)`, with its size among its arguments."""
    named = _COPY.match(str(event.get("name")))
    size_bytes = event.get("args")
    if named is None or type(size_bytes) is not int:
        return True
    return _Copy(_DIRECTIONS[named[1]], size_bytes)


def _last_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
        return file.read()
