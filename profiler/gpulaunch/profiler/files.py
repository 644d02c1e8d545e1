"""Atomic writes and non-blocking reads of small files that several processes share.

They are in our own directories, so they are nearly always regular files. But opening a FIFO waits for its other end,
and reading an endless file fills the memory; neither may block a process that watches a job. A hung file system is
another matter: it blocks every call, and only a separate thread protects against that.

Ranks use this, too: it imports the standard library only, and little of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from os import PathLike
    from typing import BinaryIO


_MOST_BYTES: Final = 16 << 20
"""More than the accounts of 256 ranks take."""
_PIECE_BYTES: Final = 1 << 17
_OWNER: Final = 0o600


def read_file(path: str | PathLike[str], *, most_bytes: int = _MOST_BYTES) -> bytes:
    """Return the content of a file. Raises OSError; EFBIG if it is larger than `most_bytes`."""
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


def write_file(path: str | PathLike[str], pieces: Iterable[str | bytes], *, mode: int = _OWNER) -> None:
    """Write a file; readers find the old one or the new one, never half. Raises OSError. See `replacing`."""
    with replacing(path, mode=mode) as file:
        file.writelines(piece.encode("utf-8", "replace") if isinstance(piece, str) else piece for piece in pieces)


@contextlib.contextmanager
def replacing(path: str | PathLike[str], *, mode: int = _OWNER, suffix: str = ".tmp") -> Generator[BinaryIO]:
    """Open a draft beside a file, which replaces it at the end; on any failure the file stays unchanged.

    Args:
        path: the file. A link there is replaced, not followed.
        mode: permissions, regardless of the umask; by default for the owner only.
        suffix: of the draft. Its name is fixed, so that killed writers leave at most one: a path may have one writer
            at a time. Several writers each need a suffix of their own.

    Raises:
        OSError: it cannot be written.
    """
    draft = f"{os.fspath(path)}{suffix}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(draft)
    # A draft is always new (O_EXCL): the directory may be world-writable, and an existing file (a link to a file of
    # ours, a FIFO without a reader) must not be written to.
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            if mode != _OWNER:  # restore what the umask removed; not every file system supports it
                os.fchmod(fd, mode)
            yield file
        os.replace(draft, path)
    except BaseException:  # re-raised; the draft must not keep a disk full, after an interrupt neither
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def regular(path: str | PathLike[str], flags: int) -> int:
    """Open a file; usable as the `opener` of open(). Raises OSError for a FIFO, a device, a directory."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "not a regular file")
