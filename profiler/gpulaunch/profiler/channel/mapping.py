"""Creates, maps and reads files of shared words: a rank's segment, its workers' file and the control segment.

Frequent writers map the file. Readers do not: if a mapped file is truncated, an access to the mapping kills the process
with SIGBUS, and that must not happen to a reader. So it reads with system calls, which return fewer bytes from a
truncated file and do no harm.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence

_HEAD = struct.Struct("@2Q")


def make(path: str, size_bytes: int, words: Sequence[int]) -> None:
    """Create a zeroed file that begins with `words` (native u64) at `path`, replacing any older one.

    Existing mappings of the older one stay intact. All of it is reserved here, so that a mapping cannot fault.

    Raises:
        OSError: it could not be created; ENOSPC when the tmpfs is full (here, and not as a SIGBUS in a rank later).
    """
    making = f"{path}.{os.getpid()}.new"
    fd = os.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        os.pwrite(fd, struct.pack(f"@{len(words)}Q", *words), 0)
        os.rename(making, path)
    except BaseException:  # re-raised; no half-made file stays, after an interrupt neither
        with contextlib.suppress(OSError):
            os.unlink(making)
        raise
    finally:
        os.close(fd)


def check(fd: int, path: str, *, size_bytes: int, magic: int, version: int, what: str, error: type[ValueError]) -> None:
    """Check that an open file was created by `make` and begins with the words `magic` and `version`.

    Raises:
        ValueError: as `error`: it is something else, or of another version; the message says which.
    """
    size = os.fstat(fd).st_size
    if size != size_bytes:
        raise error(f"{path}: {size} bytes, a {what} has {size_bytes}")
    found = _HEAD.unpack(os.pread(fd, _HEAD.size, 0).ljust(_HEAD.size, b"\0"))  # it may be truncated just now
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
    """Map a file after `check`; `what` names it in messages. Raises OSError, and ValueError as `check` does."""
    check(fd, path, size_bytes=size_bytes, magic=magic, version=version, what=what, error=error)
    return mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, protection)


class OpenFile:
    """A file created by `make`, kept open to be read piece by piece.

    Aligned words are read whole, as from a mapping: the kernel copies eight bytes at a time, or more.
    """

    def __init__(
        self, path: str, *, size_bytes: int, magic: int, version: int, what: str, error: type[ValueError]
    ) -> None:
        """Open the file at `path`; `what` names it in messages.

        Raises:
            OSError: no such file, or no permission to read it.
            ValueError: as `error`: it is something else, or of another version.
        """
        self.path = path
        self._expected = {"size_bytes": size_bytes, "magic": magic, "version": version}
        self._what = what
        self._error = error
        # Non-blocking: if the path is a FIFO, open() would wait for a writer.
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.check()
            self._inode = os.fstat(self.fd).st_ino
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Check that it is still what it was when it was opened. Raises ValueError, as the constructor does."""
        check(self.fd, self.path, **self._expected, what=self._what, error=self._error)

    def piece(self, offset: int, size_bytes: int) -> bytes:
        """Return `size_bytes` bytes from `offset` on.

        Raises:
            OSError: they cannot be read.
            ValueError: the file has been truncated.
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
        """Close it. May be called again."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
