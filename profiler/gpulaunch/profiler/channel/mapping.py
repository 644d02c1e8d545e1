"""How a file of shared words is made, mapped and read: a rank's segment, its workers' and the control segment.

Who writes all the time maps the file. Who reads what others write does not: a mapping of a file that is cut short ends
whoever looks at it with SIGBUS, and a reader is not the one who is to die of that. So it reads with system calls, for
which the rest of such a file is missing, and nothing else happens.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence

_HEAD = struct.Struct("@2Q")


def make(path: str, size_bytes: int, words: Sequence[int]) -> None:
    """Make a zeroed file that begins with `words` (native u64) at `path`, replacing any older one.

    Whoever has the older one mapped keeps it whole. All of it is reserved here, so that a mapping cannot fault.

    Raises:
        OSError: it could not be made; ENOSPC when the tmpfs is full (here, and not as a SIGBUS in a rank later).
    """
    making = f"{path}.{os.getpid()}.new"
    fd = os.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        os.pwrite(fd, struct.pack(f"@{len(words)}Q", *words), 0)
        os.rename(making, path)
    except BaseException:  # whatever it is goes on; but no half-made file stays
        with contextlib.suppress(OSError):
            os.unlink(making)
        raise
    finally:
        os.close(fd)


def check(fd: int, path: str, *, size_bytes: int, magic: int, version: int, what: str, error: type[ValueError]) -> None:
    """See that an open file is one that `make` has made, whose first two words are `magic` and `version`.

    Raises:
        ValueError: as `error`: it is something else, or of another version; the text says which.
    """
    size = os.fstat(fd).st_size
    if size != size_bytes:
        raise error(f"{path}: {size} bytes, a {what} has {size_bytes}")
    found = _HEAD.unpack(os.pread(fd, _HEAD.size, 0).ljust(_HEAD.size, b"\0"))  # it may be cut short just now
    if found[0] != magic:
        raise error(f"{path}: not a gpulaunch {what}")
    if found[1] != version:
        raise error(f"{path}: {what} version {found[1]}, this gpulaunch knows version {version}")


def map_checked(
    fd: int,
    path: str,
    protection: int,
    *,
    size_bytes: int,
    magic: int,
    version: int,
    what: str,
    error: type[ValueError],
) -> mmap.mmap:
    """Map a file after `check`; `what` it is, for people. Raises OSError, and ValueError as `check` does."""
    check(fd, path, size_bytes=size_bytes, magic=magic, version=version, what=what, error=error)
    return mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, protection)


class Held:
    """A file that `make` has made, held open to be read piece by piece.

    Aligned words come whole, as they do out of a mapping: the kernel copies eight bytes at a time, or more.
    """

    def __init__(
        self, path: str, *, size_bytes: int, magic: int, version: int, what: str, error: type[ValueError]
    ) -> None:
        """Open the file at `path`; `what` it is, for people.

        Raises:
            OSError: no such file, or no right to read it.
            ValueError: as `error`: it is something else, or of another version.
        """
        self.path = path
        self._expected = {"size_bytes": size_bytes, "magic": magic, "version": version}
        self._what = what
        self._error = error
        # Non-blocking: where a FIFO lies in its place, open() would wait for somebody to write to it.
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.check()
            self._inode = os.fstat(self.fd).st_ino
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """See that it is still what it was when it was opened. Raises ValueError, as the constructor does."""
        check(self.fd, self.path, **self._expected, what=self._what, error=self._error)

    def piece(self, offset: int, size_bytes: int) -> bytes:
        """Give so many bytes from there on.

        Raises:
            OSError: they cannot be read.
            ValueError: the file has been cut short.
        """
        found = os.pread(self.fd, size_bytes, offset)
        if len(found) != size_bytes:
            raise self._error(f"{self.path}: this {self._what} has been cut short")
        return found

    def replaced(self) -> bool:
        """True if the path now has another file (a new attempt has begun) or none (the job has ended)."""
        try:
            return os.stat(self.path).st_ino != self._inode
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Let it go. May be called again."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
