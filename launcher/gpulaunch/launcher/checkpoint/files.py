"""The files of one checkpoint under examination: reading them, what was seen of them, what need not be read again."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator
from typing import Any, BinaryIO

from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.memory import Memory
from gpulaunch.launcher.checkpoint.source import Entry, Source, join

CHUNK_BYTES = 1 << 20
MAX_IN_DIRECTORY = 100_000
JSON_CAP_BYTES = 256 << 20


class Files:
    """What the checks of every format read through. Whatever the storage refuses becomes Damaged."""

    def __init__(self, source: Source, memory: Memory, base: str) -> None:
        """`base`: the checkpoint's own path, which its parts are named relative to."""
        self._source = source
        self._memory = memory
        self._base = base
        self.seen: dict[str, Entry] = {}
        """Every file that belongs to the checkpoint."""

    def label(self, path: str) -> str:
        """Name a part as the user finds it in the checkpoint; the checkpoint itself by its last name."""
        inside = path.removeprefix(f"{self._base}/") if self._base else path
        return inside if path != self._base else path.rpartition("/")[2] or "it"

    def look(self, path: str) -> Entry | None:
        """Look at a file that may be missing."""
        try:
            return self._source.entry(path)
        except OSError as err:
            raise Damaged(f"{self.label(path)} cannot be read: {reason(err)}") from None

    def entry(self, path: str) -> Entry:
        """Look at a file that must be there."""
        found = self.look(path)
        if found is None or found.is_dir:
            raise Damaged(f"{self.label(path)} is missing")
        return found

    def listing(self, path: str) -> dict[str, Entry]:
        """Look into a directory."""
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
                yield file
        except FileNotFoundError:
            raise Damaged(f"{self.label(entry.path)} is missing") from None
        except OSError as err:
            raise Damaged(f"{self.label(entry.path)} cannot be read: {reason(err)}") from None

    def content(self, path: str, cap_bytes: int) -> bytes:
        """Read a small file whole."""
        entry = self.entry(path)
        if entry.size_bytes > cap_bytes:
            raise Damaged(f"{self.label(path)} has {entry.size_bytes} bytes, more than can be sensible")
        with self.opened(entry) as file:
            return file.read(cap_bytes + 1)

    def json(self, path: str) -> dict[str, Any]:
        """Read a JSON object."""
        return json_object(self.content(path, JSON_CAP_BYTES), self.label(path))

    def knows(self, entry: Entry, fact: str) -> bool:
        """Whether this was established earlier of the unchanged file."""
        self.seen[entry.path] = entry
        return self._memory.knows(self._source.where(entry.path), entry, fact)

    def learn(self, entry: Entry, fact: str) -> None:
        """Remember what has been established of the file."""
        self._memory.learn(self._source.where(entry.path), entry, fact)

    def inside(self, directory: str, name: str, *, said_by: str) -> str:
        """Join a name that a file of the checkpoint gave; a name that leads out of the directory is refused."""
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
    """Say what the storage said, in its shortest form."""
    return os.strerror(err.errno) if err.errno else str(err.args[-1] if err.args else type(err).__name__)
