"""Small files of ours that others read: written whole or not at all, and read without ever waiting.

They lie in directories of ours, and so are nearly always what they should be. But whoever opens a FIFO waits for its
other end, and what has no end fills the memory; nobody who watches a job is to be held up by either. A file system that
has hung is another matter: it holds up every call, and only a thread of its own is safe from that.

Ranks use this, too: nothing but the standard library, and little of that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["read_file", "regular", "write_file"]

_MOST_BYTES: Final = 16 << 20
"""More than the accounts of 256 ranks take."""
_PIECE_BYTES: Final = 1 << 17


def read_file(path: str | PathLike[str], *, most_bytes: int = _MOST_BYTES) -> bytes:
    """Give what is in a file. Raises OSError; EFBIG where there is more than `most_bytes`."""
    fd = regular(path, os.O_RDONLY)
    try:
        text = b""
        while piece := os.read(fd, _PIECE_BYTES):
            text += piece
            if len(text) > most_bytes:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return text
    finally:
        os.close(fd)


def write_file(path: str | PathLike[str], pieces: Iterable[str]) -> None:
    """Write a file for its owner only; readers find the old one or the new one, never half. Raises OSError.

    One process at a time writes a file: the draft beside it has a fixed name, so that whoever is killed leaves one.
    """
    draft = f"{os.fspath(path)}.tmp"
    fd = regular(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
    try:
        with open(fd, "w", encoding="utf-8", errors="replace") as file:
            file.writelines(pieces)
        os.replace(draft, path)
    except BaseException:  # whatever it is goes on; but a full disk is not to stay full of us
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def regular(path: str | PathLike[str], flags: int) -> int:
    """Open a file, fit to be the `opener` of open(); OSError for what is none: a FIFO, a device, a directory."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "not a regular file")
