"""Records what was verified in full, so that a restart does not read terabytes again and an interrupted search
continues: the memory is written as files become known, not only at the end.

A file is identified by its full path and by a mark that changes with its content (size, times, inode, or the remote
storage's own); what was established about it is a short text, so a file that must now be something else, such as
another SHA-256, is read again. Bit rot that does not change a file's times is not detected a second time: to have
such a file read again, remove the memory file.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from typing import Any

from gpulaunch.launcher.checkpoint.source import Entry

SETTLED_S = 2.0
"""A file written within this time may change again without a change of its times (coarse clocks): not remembered."""

SAVE_EVERY_S = 5.0
_CAP_BYTES = 64 << 20
_CAP_FILES = 100_000


class Memory:
    """The memory file; with None as its path nothing is remembered. A damaged one is ignored. Never raises."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._known = _load(path) if path else {}
        self._fresh: dict[str, tuple[str, str]] = {}
        self._lock = threading.Lock()  # several threads read files
        self._saved_s = time.monotonic()

    def knows(self, where: str, entry: Entry, fact: str) -> bool:
        """Whether this was established of the file in its present state."""
        known = bool(entry.mark) and self._known.get(where) == (entry.mark, fact)
        if known:
            with self._lock:
                self._fresh[where] = (entry.mark, fact)
        return known

    def learn(self, where: str, entry: Entry, fact: str) -> None:
        """Remember what was established of the file as it was when `entry` was taken, before it was read."""
        if entry.mark and time.time() - entry.changed_s > SETTLED_S:
            with self._lock:
                self._fresh[where] = (entry.mark, fact)
                if time.monotonic() - self._saved_s > SAVE_EVERY_S:
                    self.save()
                    self._saved_s = time.monotonic()

    def save(self) -> None:
        """Write the file atomically; first what this search saw, then what earlier ones did, bounded in size."""
        if not self._path or not (self._fresh.items() - self._known.items()):
            return
        kept = {**self._fresh, **{where: known for where, known in self._known.items() if where not in self._fresh}}
        document = {"version": 1, "files": dict(list(kept.items())[:_CAP_FILES])}
        temporary = f"{self._path}.{os.urandom(4).hex()}.tmp"  # nodes may share the directory
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(document, file)
            os.replace(temporary, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _load(path: str) -> dict[str, tuple[str, str]]:
    try:
        with open(path, "rb") as file:
            document: Any = json.loads(file.read(_CAP_BYTES))
        return {str(where): (str(mark), str(fact)) for where, (mark, fact) in document["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
