"""Reads a rank's error file, by any writer: our `inside.py`, torch's `@record`, the user's handler.

The file is untrusted: it may be missing, half written, huge, not JSON, not even a file. Reading it never raises and
never reads more than `READ_CAP_BYTES`.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass

READ_CAP_BYTES = 4 << 20
TEXT_CAP = 65_536
"""Characters kept of a message and of a traceback; those written by `inside.py` are not longer."""


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The exception that ended a rank, as the rank reported it."""

    type: str
    """Name of the exception's class, without its module; empty if the writer did not say."""
    message: str
    """Its text, without the class name in front."""
    traceback: str
    """As Python prints it, oldest exception of a chain first; may be empty."""
    at_monotonic_s: float | None
    """When it was raised through the top of the program, on this host's monotonic clock; torch does not write it."""
    at_wall_s: float
    """The same by the wall clock; 0.0 if the writer did not say."""

    @property
    def headline(self) -> str:
        """Return `ValueError: x`, like the last line of a traceback."""
        return f"{self.type}: {self.message}" if self.type and self.message else self.type or self.message


def examine(path: str) -> tuple[RankError | None, str | None]:
    """Read an error file of any torch style; if it exists but is invalid, say so in one line. Never raises."""
    name = os.path.basename(path)
    data = read_bounded(path, READ_CAP_BYTES + 1)
    if data is None:
        return None, None
    if not data.strip():
        return None, f"{name} is empty: the rank could not finish writing it (disk full?)"
    if len(data) > READ_CAP_BYTES:
        return None, f"{name} is larger than {READ_CAP_BYTES >> 20} MiB and was not read; it begins: {_beginning(data)}"
    error = _parse(data)
    if error is None:
        return None, f"{name} is not a complete error file; it begins: {_beginning(data)}"
    return error, None


def load_json(data: bytes) -> object:
    """Parse JSON from outside; None if it is invalid."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # ValueError: also bad UTF-8 and integers of a million digits
        return None


def read_bounded(path: str, limit_bytes: int) -> bytes | None:
    """Read the first bytes of a regular file; None if there is no such file. Never blocks, never raises."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # O_NONBLOCK: opening a FIFO must not wait
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(limit_bytes)
    except OSError:
        return None
    finally:
        os.close(fd)


def _parse(data: bytes) -> RankError | None:
    """Parse both of torch's layouts: `message` as an object with `extraInfo`, and as a plain string."""
    document = load_json(data)
    if not isinstance(document, dict):
        return None
    message, timestamp = document.get("message"), document.get("timestamp")
    extra: dict[str, object] = {}
    if isinstance(message, dict):
        if isinstance(message.get("extraInfo"), dict):
            extra = message["extraInfo"]
        message, timestamp = message.get("message"), extra.get("timestamp")
    if not isinstance(message, str):
        return None
    kind, text = _split(message, _string(extra.get("type")))
    monotonic_ns = _number(extra.get("monotonic_ns"))
    wall_ns = _number(extra.get("wall_ns"))
    return RankError(
        type=kind,
        message=text[:TEXT_CAP],
        traceback=_string(extra.get("py_callstack"))[-TEXT_CAP - 256 :],
        at_monotonic_s=None if monotonic_ns is None else monotonic_ns / 1e9,
        at_wall_s=(_number(timestamp) or 0.0) if wall_ns is None else wall_ns / 1e9,
    )


def _split(message: str, kind: str) -> tuple[str, str]:
    """Split `ValueError: x`; without our `type` field, the prefix counts only if it looks like a class name."""
    head, colon, text = message.partition(": ")
    if kind:
        return kind, text if colon and head == kind else message.removeprefix(f"{kind}:")
    name = head if colon else message.removesuffix(":")
    if name.replace(".", "_").isidentifier() and name[:1].isupper():
        return name.rpartition(".")[2], text
    return "", message


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    if not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < 1e20 else None  # also rejects nan and inf


def _beginning(data: bytes) -> str:
    return data[:200].decode("utf-8", "replace")
