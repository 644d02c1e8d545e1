"""Which live run owns a checkpoint directory.

`.owner` records the last claim: run, attempt, process, host. The owner keeps it locked (flock) for as long as its
process lives, so a lock never outlives a run, and a crash needs no cleanup. A new owner renames its own file over it:
so a newer attempt of the same run need not wait for a stopped rank of an older one that is still alive.

The lock belongs to the open file, which a forked child (a dataloader worker, which may outlive the run) inherits: the
child closes it. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

OWNER = ".owner"
_CAP_BYTES = 64 << 10
_LIFE = os.urandom(4).hex()
_CANNOT_LOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.EINVAL)
"""Errors of file systems without locks: Lustre mounted without `flock`, NFS without lockd; EBADF: NFS, read-only."""

_held: dict[str, int] = {}  # path -> descriptor


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A run, and its process that saves."""

    run: str
    """Under a job of several nodes: $GPULAUNCH_JOB; under another: $GPULAUNCH_RUN_ID; else unique to the process."""
    attempt: int
    """With $GPULAUNCH_JOB: $GPULAUNCH_GENERATION, which grows over all nodes."""
    program: str
    pid: int
    host: str
    since_s: float
    """Wall clock."""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_s))
        text = f"run {self.run} ({self.program}, pid {self.pid} on {self.host} since {since})"
        return "".join(letter if letter.isprintable() else "?" for letter in text)

    def may_follow(self, other: Owner) -> bool:
        """Whether this one may take over from a live `other`: a newer attempt of one run, or the same process, which
        makes another `Checkpoint`."""
        if self.run != other.run:
            return False
        return self.attempt > other.attempt or (self.pid, self.host) == (other.pid, other.host)

    def is_older_than(self, other: Owner) -> bool:
        """Whether `other` is a newer attempt of the same run."""
        return self.run == other.run and self.attempt < other.attempt


class InUseError(Exception):
    """Another live run owns the directory."""

    def __init__(self, directory: str, owner: Owner | None) -> None:
        who = f"by {owner}" if owner else "by another run"
        super().__init__(
            f"{directory} is in use {who}: wait until it ends, or save elsewhere (Checkpoint(dir=...), "
            f"gpulaunch --checkpoint-dir); if that run's host is permanently lost, remove {directory}/{OWNER}"
        )


def this_run(environ: Mapping[str, str]) -> Owner:
    """The identity of this process."""
    job = environ.get("GPULAUNCH_JOB")
    return Owner(
        run=job or environ.get("GPULAUNCH_RUN_ID") or f"{_LIFE}-{os.getpid()}",
        attempt=int(environ.get("GPULAUNCH_GENERATION" if job else "GPULAUNCH_ATTEMPT") or 0),
        program=os.path.basename(sys.argv[0]) or "python",
        pid=os.getpid(),
        host=socket.gethostname(),
        since_s=time.time(),
    )


def last(directory: str) -> Owner | None:
    """The last claim of the directory, alive or not; None: unknown. Raises OSError unless the file is missing."""
    try:
        with open(os.path.join(directory, OWNER), "rb") as file:
            document = json.loads(file.read(_CAP_BYTES))
        return Owner(
            run=str(document["run"]),
            attempt=int(document["attempt"]),
            program=str(document["program"]),
            pid=int(document["pid"]),
            host=str(document["host"]),
            since_s=min(max(float(document["since_s"]), 0.0), 1e11),
        )
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def is_live(directory: str) -> bool:
    """Whether the owner is alive: it holds its lock. Unknown if locks are impossible: False."""
    path = os.path.join(directory, OWNER)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:  # another user's: a read-only descriptor is enough, except on NFS
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as err:
        if err.errno not in (errno.ENOENT, errno.ELOOP):  # ELOOP: a symbolic link, which no owner makes
            raise
        return False
    try:
        return not lock(descriptor)
    finally:
        unlock(descriptor)


def take(directory: str, owner: Owner) -> None:
    """Become the owner, for the life of this process. Call it with the directory's own lock held. Raises OSError."""
    path = os.path.join(directory, OWNER)
    new = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        lock(descriptor)
        os.write(descriptor, json.dumps(asdict(owner)).encode())
        os.rename(new, path)
    except BaseException:
        unlock(descriptor)
        raise
    if path in _held:
        unlock(_held[path])
    _held[path] = descriptor


def lock(descriptor: int) -> bool:
    """Lock an open file without waiting; False: another process holds the lock. True if locks are impossible."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as err:
        if err.errno not in _CANNOT_LOCK:
            raise
    return True


def unlock(descriptor: int) -> None:
    """Unlock and close, though a child forked meanwhile may have the same open file."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _forget() -> None:
    """In a forked child: release the descriptor; the lock is its parent's, and must end with the parent."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
