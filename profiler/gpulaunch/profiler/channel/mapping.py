"""How a file of shared words is made and opened: the same for a rank's page and a node's control page."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence

__all__ = ["make", "map_checked"]


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
    """Map a file that `make` has made, whose first two words are `magic` and `version`; `what` it is, for people.

    Raises:
        ValueError: as `error`: it is something else, or of another version; the text says which.
    """
    size = os.fstat(fd).st_size
    if size != size_bytes:
        raise error(f"{path}: {size} bytes, a {what} has {size_bytes}")
    mapped = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, protection)
    found = struct.unpack_from("@2Q", mapped, 0)
    if found == (magic, version):
        return mapped
    mapped.close()
    if found[0] != magic:
        raise error(f"{path}: not a gpulaunch {what}")
    raise error(f"{path}: {what} version {found[1]}, this gpulaunch knows version {version}")
