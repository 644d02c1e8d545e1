"""The checkpoint directory: its owner, how a save becomes a checkpoint, which checkpoints are kept.

    step-000000000120/            a checkpoint: complete, because it was renamed to this only then
    .saving-000000000240-g7/      a save in progress, of generation 7
    .replaced-000000000120/       the former `step-...120` while another takes its place
    .deleting-000000000120-g7/    being deleted
    .generation                   the newest generation that was claimed
    .lock                         held (flock) to claim, to commit, and to choose what is deleted
    .owner                        the last claim; locked while that run lives, see ownership.py

A generation is one run of the program. It is claimed by reading the number and writing the next one, under the lock; a
save is renamed into place under the same lock, and only while the number is still ours. So a suspended process that
continues after a newer one has claimed can commit nothing; nor can it claim, since a newer attempt of its own run is
recorded in `.owner` permanently, and another run is refused while the owner lives. If a file system has no locks
(Lustre mounted without `flock`), only the numbers tell a run that it was taken over. Standard library only; one rank
calls it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from time import monotonic, sleep

from gpulaunch.checkpoint import ownership
from gpulaunch.checkpoint.messages import say
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.manifest import Manifest, read, write

LOCK_WAIT_S = 30.0
"""The lock is held for a few renames; a process that holds it longer has been stopped."""
OWNER_WAIT_S = 10.0
"""How long to wait for a live owner: ranks of a job that was ended and restarted at once may still be dying."""
LOST_HOST_WAIT_S = 100.0
"""The same if the owner is on another host: a lost host keeps its NFS locks until its lease ends, which is
90 s (Linux, fs/nfsd/nfs4state.c: `nn->nfsd4_lease = 90`)."""

_STEP = re.compile(r"step-(\d{12,})$")
_TEMPORARY = re.compile(r"\.(?:saving|deleting)-\d+-g(\d+)$")
_REPLACED = re.compile(r"\.replaced-(\d{12,})$")


class StaleError(Exception):
    """A newer generation has claimed the directory: this one may no longer write. The text names its owner."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A complete checkpoint."""

    path: str
    step: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints are kept."""

    newest: int | None
    """This many of the newest; None: all."""
    every: int | None
    """Also those of a step that is a multiple of this."""


class Store:
    """One checkpoint directory."""

    def __init__(self, directory: str) -> None:
        self.directory = os.path.realpath(directory)
        self.owner = ownership.this_run(os.environ)
        self.generation: int | None = None
        """Ours; None: not claimed yet."""
        self.least_generation = 0
        """What the next claim is at least."""

    def claim(self) -> int:
        """Become the owner and the newest generation, and remove what older ones have left unfinished.

        Raises:
            InUseError: another live run owns it.
            StaleError: a newer attempt of this run has claimed it.
            OSError: the directory cannot be written.
        """
        os.makedirs(self.directory, exist_ok=True)
        began_s, is_told = monotonic(), False
        while True:
            with self.locked():
                other = ownership.last(self.directory)
                if other is not None and self.owner.is_older_than(other):
                    raise StaleError(other)
                if (other is not None and self.owner.may_follow(other)) or not ownership.is_live(self.directory):
                    generation = self._become_owner()
                    break
            is_elsewhere = other is not None and other.host != self.owner.host
            wait_s = LOST_HOST_WAIT_S if is_elsewhere else OWNER_WAIT_S
            if is_elsewhere and not is_told:
                is_told = True
                say(
                    f"waiting up to {wait_s:.0f} s for {self.directory}: it is in use by {other}; if that host is "
                    "lost, an NFS server keeps its lock for about 90 s"
                )
            if monotonic() - began_s > wait_s:
                raise ownership.InUseError(self.directory, other)
            sleep(0.1)
        self.generation = generation
        for name in os.listdir(self.directory):
            temporary = _TEMPORARY.match(name)
            if _REPLACED.match(name) or (temporary and int(temporary[1]) < generation):
                shutil.rmtree(self._path(name), ignore_errors=True)
        return generation

    def _become_owner(self) -> int:
        """Take and return the next number, with the lock held."""
        ownership.take(self.directory, self.owner)
        generation = max(self._newest_generation() + 1, self.least_generation)
        new = self._path(".generation.new")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        with open(new, "x", encoding="ascii") as file:  # a symbolic link left there by another user is not followed
            file.write(f"{generation}\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(new, self._path(".generation"))
        _sync(self.directory)
        for name in os.listdir(self.directory):
            replaced = _REPLACED.match(name)
            if replaced and not os.path.exists(self._path(f"step-{replaced[1]}")):
                os.rename(self._path(name), self._path(f"step-{replaced[1]}"))
        return generation

    def begin(self, step: int) -> str:
        """Make the directory for a save of `step`."""
        path = self._path(f".saving-{step:012d}-g{self.generation}")
        shutil.rmtree(path, ignore_errors=True)
        os.mkdir(path)
        return path

    def abandon(self, path: str) -> None:
        """Remove a failed save."""
        shutil.rmtree(path, ignore_errors=True)

    def commit(self, path: str, manifest: Manifest, keep: Keep, spare: str | None) -> None:
        """Make a complete checkpoint of what was written to `path`, then delete those that are not kept.

        Args:
            path: from `begin`; all its files are on disk.
            manifest: names all its files.
            keep: which checkpoints are kept.
            spare: one that is always kept: the one that this run was resumed from.

        Raises:
            StaleError: a newer generation has claimed the directory.
            OSError: the manifest cannot be written, or the directory cannot be renamed.
        """
        write(path, manifest)
        final = self.path_of(manifest.step)
        replaced = self._path(f".replaced-{manifest.step:012d}")
        doomed: list[str] = []
        with self.locked():
            if self._newest_generation() != self.generation:
                raise StaleError(ownership.last(self.directory) or "another run")
            if os.path.exists(final):
                os.rename(final, replaced)
                doomed.append(replaced)
            os.rename(path, final)
            _sync(self.directory)
            for old in obsolete(self.complete(), keep, {final, spare}):
                away = self._path(f".deleting-{old.step:012d}-g{self.generation}")
                with contextlib.suppress(OSError):  # it stays; the next commit tries again
                    os.rename(old.path, away)
                    doomed.append(away)
        for each in doomed:
            shutil.rmtree(each, ignore_errors=True)

    def path_of(self, step: int) -> str:
        """Where the checkpoint of a step is."""
        return self._path(f"step-{step:012d}")

    def complete(self) -> list[Saved]:
        """All checkpoints that have a manifest, newest first: by generation, then by step."""
        found: list[Saved] = []
        with contextlib.suppress(OSError):  # missing, or not readable: then there is none
            for name in os.listdir(self.directory):
                if _STEP.match(name):
                    with contextlib.suppress(Damaged):
                        manifest = read(self._path(name))
                        found.append(Saved(path=self._path(name), step=manifest.step, generation=manifest.generation))
        return sorted(found, key=lambda saved: (saved.generation, saved.step), reverse=True)

    def without_manifest(self) -> list[str]:
        """Directories with a checkpoint's name that are not checkpoints."""
        named = {self._path(name) for name in os.listdir(self.directory) if _STEP.match(name)}
        return sorted(named - {saved.path for saved in self.complete()})

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _newest_generation(self) -> int:
        try:
            with open(self._path(".generation"), encoding="ascii") as file:
                return int(file.read())
        except FileNotFoundError:
            pass
        except ValueError:
            pass  # damaged: what was committed still shows the progress
        return max((saved.generation for saved in self.complete()), default=0)

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Hold the lock of the directory. Raises TimeoutError (an OSError) if another process does not release it."""
        path = self._path(".lock")
        if os.path.islink(path):  # in a directory copied as symbolic links: locks belong to one directory
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            deadline_s = monotonic() + LOCK_WAIT_S
            while True:  # flock has no timeout, and the holder may have been stopped
                if ownership.lock(descriptor):
                    break
                if monotonic() > deadline_s:
                    raise TimeoutError(errno.ETIMEDOUT, "another process holds its .lock")
                sleep(0.02)
            yield
        finally:
            # A dataloader worker forked meanwhile has the descriptor, too: if it were only closed here, it would stay
            # locked for as long as that worker lives.
            ownership.unlock(descriptor)


def obsolete(saved: Iterable[Saved], keep: Keep, spared: set[str | None]) -> list[Saved]:
    """Those of `saved` (newest first) to delete."""
    if keep.newest is None:
        return []
    return [
        each
        for position, each in enumerate(saved)
        if position >= keep.newest and not (keep.every and each.step % keep.every == 0) and each.path not in spared
    ]


def sync_file(path: str) -> None:
    """Flush a file's content to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(directory: str) -> None:
    """Flush a directory's entries to disk."""
    sync_file(directory)
