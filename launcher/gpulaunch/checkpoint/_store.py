"""The checkpoint directory: who may write it, how a save becomes a checkpoint, which ones are kept.

    step-000000000120/            a checkpoint: complete, because it was renamed to this when it was
    .saving-000000000240-g7/      a save under way, of generation 7
    .replaced-000000000120/       what `step-...120` was while another takes its place
    .deleting-000000000120-g7/    on its way out
    .generation                   the newest generation that was claimed
    .lock                         held (flock) to claim, to commit, and to choose what is deleted
    .owner                        who claimed it last; locked while that run lives, see _owner.py

A generation is one life of the program. It is claimed by reading the number and writing the next one, under the lock;
a save is renamed into place under the same lock, and only while the number is still ours. So a process that was held
up, and goes on when a newer one has claimed, can commit nothing; nor can it claim, for a newer attempt of its own run
stands in `.owner` for good, and another run is refused while the owner lives. Where a file system has no locks
(Lustre mounted without `flock`), the numbers alone tell a run that it was taken over. Standard library only; one rank
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

from gpulaunch.checkpoint import _owner
from gpulaunch.checkpoint._messages import say
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.manifest import Manifest, read, write

LOCK_WAIT_S = 30.0
"""The lock is held for a few renames; who holds it for longer has been stopped."""
OWNER_WAIT_S = 10.0
"""How long a live owner is waited for: ranks of a job that was ended, and started again at once, may still be dying."""
LOST_HOST_WAIT_S = 100.0
"""The same where the owner is of another host: one that is lost keeps its NFS locks until its lease ends, which is
90 s (Linux, fs/nfsd/nfs4state.c: `nn->nfsd4_lease = 90`)."""

_STEP = re.compile(r"step-(\d{12,})$")
_TEMPORARY = re.compile(r"\.(?:saving|deleting)-\d+-g(\d+)$")
_REPLACED = re.compile(r"\.replaced-(\d{12,})$")


class StaleError(Exception):
    """A newer generation has claimed the directory: this one may write nothing any more. The text names its owner."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A complete checkpoint."""

    path: str
    step: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints stay."""

    newest: int | None
    """So many of the newest; None: all."""
    every: int | None
    """And those of a step that is a multiple of this."""


class Store:
    """One checkpoint directory."""

    def __init__(self, directory: str) -> None:
        self.directory = os.path.realpath(directory)
        self.owner = _owner.this_run(os.environ)
        self.generation: int | None = None
        """Ours; None: not claimed yet."""

    def claim(self) -> int:
        """Become the owner and the newest generation, and clear away what older ones have left half done.

        Raises:
            InUseError: another run owns it, and lives.
            StaleError: a newer attempt of this run has claimed it.
            OSError: the directory cannot be written.
        """
        os.makedirs(self.directory, exist_ok=True)
        began_s, is_told = monotonic(), False
        while True:
            with self._locked():
                other = _owner.last(self.directory)
                if other is not None and self.owner.is_older_than(other):
                    raise StaleError(other)
                if (other is not None and self.owner.may_follow(other)) or not _owner.is_live(self.directory):
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
                raise _owner.InUseError(self.directory, other)
            sleep(0.1)
        self.generation = generation
        for name in os.listdir(self.directory):
            temporary = _TEMPORARY.match(name)
            if _REPLACED.match(name) or (temporary and int(temporary[1]) < generation):
                shutil.rmtree(self._path(name), ignore_errors=True)
        return generation

    def _become_owner(self) -> int:
        """Take the next number, which is given, with the lock held."""
        _owner.take(self.directory, self.owner)
        generation = self._newest_generation() + 1
        new = self._path(".generation.new")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        with open(new, "x", encoding="ascii") as file:  # a link that another user left there is not followed
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
        """Make the directory that a save of `step` is written into."""
        path = self._path(f".saving-{step:012d}-g{self.generation}")
        shutil.rmtree(path, ignore_errors=True)
        os.mkdir(path)
        return path

    def abandon(self, path: str) -> None:
        """Remove a save that came to nothing."""
        shutil.rmtree(path, ignore_errors=True)

    def commit(self, path: str, manifest: Manifest, keep: Keep, spare: str | None) -> None:
        """Make a complete checkpoint of what was written to `path`, then delete the ones that are not kept.

        Args:
            path: what `begin` gave; all its files are on the disk.
            manifest: names all its files.
            keep: which checkpoints stay.
            spare: one that stays in any case: the one that this run was resumed from.

        Raises:
            StaleError: a newer generation has claimed the directory.
            OSError: the manifest cannot be written, or the directory not renamed.
        """
        write(path, manifest)
        final = self._path(f"step-{manifest.step:012d}")
        replaced = self._path(f".replaced-{manifest.step:012d}")
        doomed: list[str] = []
        with self._locked():
            if self._newest_generation() != self.generation:
                raise StaleError(_owner.last(self.directory) or "another run")
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

    def complete(self) -> list[Saved]:
        """All checkpoints that have a manifest, newest first: by generation, then by step."""
        found: list[Saved] = []
        with contextlib.suppress(OSError):  # not there, or not ours to read: then there is none
            for name in os.listdir(self.directory):
                if _STEP.match(name):
                    with contextlib.suppress(Damaged):
                        manifest = read(self._path(name))
                        found.append(Saved(path=self._path(name), step=manifest.step, generation=manifest.generation))
        return sorted(found, key=lambda saved: (saved.generation, saved.step), reverse=True)

    def without_manifest(self) -> list[str]:
        """Directories with a checkpoint's name that are none."""
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
            pass  # damaged: what was committed still tells how far it was
        return max((saved.generation for saved in self.complete()), default=0)

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        path = self._path(".lock")
        if os.path.islink(path):  # of a directory copied as links: locks are of one directory
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            deadline_s = monotonic() + LOCK_WAIT_S
            while True:  # flock knows no timeout, and whoever holds it may have been stopped
                if _owner.lock(descriptor):
                    break
                if monotonic() > deadline_s:
                    raise TimeoutError(errno.ETIMEDOUT, "another process holds its .lock")
                sleep(0.02)
            yield
        finally:
            # A dataloader worker that was forked meanwhile has the descriptor, too: closed here only, it would stay
            # locked for as long as that worker lives.
            _owner.unlock(descriptor)


def obsolete(saved: Iterable[Saved], keep: Keep, spared: set[str | None]) -> list[Saved]:
    """Those of `saved` (newest first) that go."""
    if keep.newest is None:
        return []
    return [
        each
        for position, each in enumerate(saved)
        if position >= keep.newest and not (keep.every and each.step % keep.every == 0) and each.path not in spared
    ]


def sync_file(path: str) -> None:
    """Have a file's bytes on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(directory: str) -> None:
    """Have a directory's entries on the disk."""
    sync_file(directory)
