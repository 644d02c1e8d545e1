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


def write_file(path: str | PathLike[str], pieces: Iterable[str | bytes], *, mode: int = _OWNER) -> None:
    """Write a file; readers find the old one or the new one, never half. Raises OSError. See `replacing`."""
    with replacing(path, mode=mode) as file:
        file.writelines(piece.encode("utf-8", "replace") if isinstance(piece, str) else piece for piece in pieces)


@contextlib.contextmanager
def replacing(path: str | PathLike[str], *, mode: int = _OWNER, suffix: str = ".tmp") -> Generator[BinaryIO]:
    """Open a draft beside a file, which takes its place in the end; where anything fails, nothing has happened.

    Args:
        path: the file. A link there is replaced, not followed.
        mode: who may read it, whatever the umask; its owner only, if nothing is said.
        suffix: of the draft. Its name is fixed, so that whoever is killed leaves one: of one path there may be one
            writer at a time. Where there may be several each needs a suffix of its own.

    Raises:
        OSError: it cannot be written.
    """
    draft = f"{os.fspath(path)}{suffix}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(draft)
    # A draft is always new (O_EXCL): the directory may be everybody's, and what lies in the way (a link to a file of
    # ours, a FIFO that nobody reads) must not be written to.
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            if mode != _OWNER:  # what the umask has taken away; not every file system can do that
                os.fchmod(fd, mode)
            yield file
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
