"""The shared-memory segments of a run: created for each attempt, copied to failure reports, removed at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterable
from typing import Any

from gpulaunch.launcher.loop.files import write_json
from gpulaunch.profiler.channel import segment, segment_writer, workers

_PREFIX = "gpulaunch"
_MADE_WITHIN_S = 60.0
"""A directory without a lock is being made; an older one was left by a launcher that was killed meanwhile."""


def directory_of(
    run_id: str,
    root: str = "/dev/shm",  # noqa: S108 (tmpfs, private directory)
) -> str:
    """The directory of a run's segments."""
    return os.path.join(root, f"{_PREFIX}-{os.getuid()}-{run_id}")


class Segments:
    """One directory on tmpfs, mode 0700, with a segment per rank; locked while the agent lives."""

    def __init__(
        self,
        run_id: str,
        *,
        run_dir: str,
        root: str = "/dev/shm",  # noqa: S108 (tmpfs, private directory)
    ) -> None:
        """Make the directory and remove those of agents that were killed. Raises OSError."""
        self._run_dir = run_dir
        self._readers: dict[int, segment.SegmentReader] = {}  # several callers read every segment each second
        self.directory = directory_of(run_id, root)
        _remove_abandoned(root)
        os.mkdir(self.directory, 0o700)
        # The lock ends with the process, whatever ends it: a directory whose lock is free is abandoned. So it is locked
        # before it gets its name.
        draft, lock = (os.path.join(self.directory, name) for name in ("lock.draft", "lock"))
        self._lock = os.open(draft, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(draft, lock)

    def prepare(self, ranks: Iterable[tuple[int, int]], attempt: int) -> None:
        """Make fresh segments for (rank, local rank) pairs, all reserved. Raises OSError, ENOSPC included."""
        self._close_readers()  # they map the segments that are replaced now
        for rank, local_rank in ranks:
            # Sockets of the previous attempt; see profiler.probe.tempdir.
            shutil.rmtree(os.path.join(self.directory, f"mp-{rank}"), ignore_errors=True)
            segment_writer.create(self.path_of(rank), rank=rank, local_rank=local_rank, attempt=attempt)
            workers.create(os.path.join(self.directory, f"workers-{rank}.bin"))
            with contextlib.suppress(FileNotFoundError):  # what a rank of the previous attempt wrote
                os.unlink(os.path.join(self.directory, f"facts-{rank}.json"))

    def path_of(self, rank: int) -> str:
        """The segment of one rank."""
        return os.path.join(self.directory, f"rank-{rank}.bin")

    def announce(self, group: dict[str, Any]) -> None:
        """Tell the sidecar which processes run."""
        self._write("group.json", {**group, "run_dir": self._run_dir})

    def write_run(self, run: dict[str, Any]) -> None:
        """Tell the sidecar the state of the run."""
        self._write("run.json", run)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # observing fails open: no space for this file is no reason to stop a job
            write_json(os.path.join(self.directory, name), content)

    def read(self, rank: int) -> segment.SegmentSnapshot | None:
        """A snapshot of a rank's segment, or None if it cannot be read."""
        try:
            reader = self._readers.get(rank)
            if reader is None:
                reader = self._readers[rank] = segment.SegmentReader(self.path_of(rank))
            return reader.read()
        except (OSError, ValueError):
            return None

    def keep(self, rank: int, directory: str) -> None:
        """Copy a dead rank's segment to its log directory: its last steps, as in a flight recorder."""
        with contextlib.suppress(OSError):
            shutil.copyfile(self.path_of(rank), os.path.join(directory, "page.bin"))

    def _close_readers(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def close(self) -> None:
        """Remove the directory."""
        self._close_readers()
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(root: str) -> None:
    """Remove this user's segment directories whose agent is gone (killed together with its orphan reaper)."""
    mine = f"{_PREFIX}-{os.getuid()}-"
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            path = os.path.join(root, name)
            if not name.startswith(mine) or os.path.islink(path):
                continue
            with contextlib.suppress(OSError):
                try:
                    lock = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                except FileNotFoundError:
                    if abs(time.time() - os.stat(path).st_mtime) > _MADE_WITHIN_S:
                        shutil.rmtree(path, ignore_errors=True)
                    continue
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(lock)
