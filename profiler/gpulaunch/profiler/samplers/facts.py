"""Reads a rank's facts about its environment: `facts-<rank>.json`, again whenever it was replaced."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from gpulaunch.profiler.files import read_file

_VERSION: Final = 1
_MOST_BYTES: Final = 1 << 16


class FactsFile:
    """The facts of one rank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._facts: Mapping[str, Any] = {}

    def read(self) -> Mapping[str, Any]:
        """The newest facts that could be read; empty before the first.

        Raises:
            OSError, ValueError: the file has changed and cannot be read; the next call returns the earlier facts.
        """
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            self._seen, self._facts = None, {}
            return self._facts
        seen = stat.st_ino, stat.st_mtime_ns
        if seen != self._seen:
            self._seen = seen
            self._facts = _parse(read_file(self._path, most_bytes=_MOST_BYTES))
        return self._facts


def _parse(text: bytes) -> Mapping[str, Any]:
    try:
        document: Any = json.loads(text)
    except RecursionError as error:
        raise ValueError("damaged") from error
    facts = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
    if facts.get("version") != _VERSION:
        raise ValueError("not facts of this version")
    return facts
