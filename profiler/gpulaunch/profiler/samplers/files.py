"""Small files beside the pages and in the run directory, read and written without ever waiting.

They are ours, in directories of ours, and so nearly always what they should be. But whoever opens a FIFO waits for its
other end, and what has no end fills the memory; the sidecar's loop is to survive both.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["read_file", "without_waiting", "write_file"]

_MOST_BYTES: Final = 16 << 20
"""More than the accounts of 256 ranks take."""
_PIECE_BYTES: Final = 1 << 17


def read_file(path: Path, *, most_bytes: int = _MOST_BYTES) -> bytes:
    """Give what is in a file. Raises OSError; EFBIG where there is more than `most_bytes`."""
    fd = without_waiting(path, os.O_RDONLY)
    try:
        text = b""
        while piece := os.read(fd, _PIECE_BYTES):
            text += piece
            if len(text) > most_bytes:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return text
    finally:
        os.close(fd)


def write_file(path: Path, pieces: Iterable[str]) -> None:
    """Write a file for its owner only; readers find the old one or the new one, never half. Raises OSError."""
    draft = path.with_name(path.name + ".tmp")
    fd = without_waiting(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
    with open(fd, "w", encoding="utf-8") as file:
        file.writelines(pieces)
    draft.replace(path)


def without_waiting(path: str | Path, flags: int) -> int:
    """Open a file; fit to be the `opener` of open(). A FIFO is found empty, or refused with ENXIO."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
