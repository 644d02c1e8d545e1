"""The files of one checkpoint being verified: reads them, records results, skips what need not be read again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, BinaryIO, TypeVar, cast

from gpulaunch.launcher.checkpoint.damaged import Damaged, OutOfTimeError
from gpulaunch.launcher.checkpoint.memory import Memory
from gpulaunch.launcher.checkpoint.source import Entry, Source, join

CHUNK_BYTES = 1 << 20
MAX_IN_DIRECTORY = 100_000
JSON_CAP_BYTES = 256 << 20
MAX_THREADS = 8
MAX_THREADS_BEHIND = 2
"""Limit for a process that reads while the ranks train."""


class _Timed:
    """A file with a read deadline; only the part of the interface that the checks use."""

    def __init__(self, file: BinaryIO, until_s: float) -> None:
        self._file = file
        self._until_s = until_s
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if monotonic() > self._until_s:
            raise OutOfTimeError
        return self._file.read(size)


Work = TypeVar("Work")
Outcome = TypeVar("Outcome")


def in_parallel(work: Callable[[Work], Outcome], things: Iterable[Work]) -> list[Outcome]:
    """Call `work` for each of `things`, in as many threads as there are cores, at most MAX_THREADS: hashes, CRCs and
    reads of a mebibyte release the GIL. Raises the first exception, in the order of `things`; calls that had not begun
    are skipped.
    """
    workers = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, thing) for thing in things]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class Files:
    """The reader for the checks of every format. Every storage error becomes Damaged."""

    def __init__(
        self,
        source: Source,
        memory: Memory,
        base: str,
        *,
        until_s: float = math.inf,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """`base`: the checkpoint's own path, which its parts are named relative to. `until_s`: when (monotonic) to stop
        reading file contents, with OutOfTimeError; -inf: only the structure is read, the rest is assumed correct.
        `share`: (which, of how many) share of the parts is read, by their names; the rest is assumed correct. A
        checkpoint of one file is read in every share: the ranks of every node load it anyway."""
        self._until_s = until_s
        self._share = share
        self._source = source
        self._memory = memory
        self._base = base
        self.all_read = True
        """Whether everything was read, nothing assumed."""
        self.seen: dict[str, Entry] = {}
        """Every file that belongs to the checkpoint."""

    def label(self, path: str) -> str:
        """Name a part as the user finds it in the checkpoint; the checkpoint itself by its last path component."""
        inside = path.removeprefix(f"{self._base}/") if self._base else path
        return inside if path != self._base else path.rpartition("/")[2] or "it"

    def look(self, path: str) -> Entry | None:
        """Stat a file that may be missing."""
        try:
            return self._source.entry(path)
        except OSError as err:
            raise Damaged(f"{self.label(path)} cannot be read: {reason(err)}") from None

    def entry(self, path: str) -> Entry:
        """Stat a file that must exist."""
        found = self.look(path)
        if found is None or found.is_dir:
            raise Damaged(f"{self.label(path)} is missing")
        return found

    def listing(self, path: str) -> dict[str, Entry]:
        """List a directory."""
        try:
            return {entry.name: entry for entry in self._source.listing(path, MAX_IN_DIRECTORY)}
        except OSError as err:
            raise Damaged(f"{self.label(path)} cannot be read: {reason(err)}") from None

    @contextlib.contextmanager
    def opened(self, entry: Entry) -> Generator[BinaryIO]:
        """Read one file of the checkpoint."""
        self.seen[entry.path] = entry
        try:
            with self._source.open(entry.path) as file:
                timed = -math.inf < self._until_s < math.inf
                yield cast(BinaryIO, _Timed(file, self._until_s)) if timed else file
        except FileNotFoundError:
            raise Damaged(f"{self.label(entry.path)} is missing") from None
        except OSError as err:
            raise Damaged(f"{self.label(entry.path)} cannot be read: {reason(err)}") from None

    def content(self, path: str, cap_bytes: int) -> bytes:
        """Read a small file whole."""
        entry = self.entry(path)
        if entry.size_bytes > cap_bytes:
            raise Damaged(f"{self.label(path)} has {entry.size_bytes} bytes, which is too large")
        with self.opened(entry) as file:
            return file.read(cap_bytes + 1)

    def json(self, path: str) -> dict[str, Any]:
        """Read a JSON object."""
        return json_object(self.content(path, JSON_CAP_BYTES), self.label(path))

    def knows(self, entry: Entry, fact: str) -> bool:
        """Whether this fact was established earlier and the file is unchanged."""
        self.seen[entry.path] = entry
        known = self._memory.knows(self._source.where(entry.path), entry, fact)
        if not known and self._is_believed(entry):
            self.all_read = False
            return True
        return known

    def learn(self, entry: Entry, fact: str) -> None:
        """Remember what has been established of the file."""
        if not self._is_believed(entry):
            self._memory.learn(self._source.where(entry.path), entry, fact)

    def _is_believed(self, entry: Entry) -> bool:
        which, shares = self._share
        name = self.label(entry.path).encode("utf-8", "surrogateescape")
        is_another_share = entry.path != self._base and zlib.crc32(name) % shares != which
        return self._until_s == -math.inf or is_another_share

    def inside(self, directory: str, name: str, *, said_by: str) -> str:
        """Join a name read from a file of the checkpoint; a name that leads out of the directory is rejected."""
        if not name or name.startswith("/") or "\0" in name or ".." in name.split("/"):
            raise Damaged(f"{said_by} names the file {name[:80]!r}")
        return join(directory, name)


def json_object(data: bytes, name: str) -> dict[str, Any]:
    """Parse JSON from outside that must be an object. Raises Damaged."""
    try:
        document: object = json.loads(data)
    except (ValueError, RecursionError):  # ValueError: also bad UTF-8 and integers of a million digits
        raise Damaged(f"{name} is not JSON" if data.strip() else f"{name} is empty") from None
    if not isinstance(document, dict):
        raise Damaged(f"{name} is not a JSON object")
    return document


def reason(err: OSError) -> str:
    """The storage's error message in its shortest form."""
    return os.strerror(err.errno) if err.errno else str(err.args[-1] if err.args else type(err).__name__)
