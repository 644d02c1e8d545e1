"""Writes and reads rows as JSON Lines, one object per row, streamed.

The first line identifies the format: {"kind": "export", "version": 1}. Fields that a row does not have are omitted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, Final, TextIO

from gpulaunch.exporters.files.rows import Row
from gpulaunch.exporters.store.bounded import sound

VERSION: Final = 1
_NAMES: Final = tuple(each.name for each in fields(Row))


def write_jsonl(rows: Iterable[Row], out: TextIO) -> int:
    """Write rows; return their number. Raises OSError."""
    out.write(json.dumps({"kind": "export", "version": VERSION}) + "\n")
    count = 0
    for row in rows:
        told = {name: value for name in _NAMES if (value := getattr(row, name)) is not None and value != {}}
        out.write(_line(told) + "\n")
        count += 1
    return count


def read_jsonl(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the rows of such a file.

    Raises:
        ValueError: it is not such a file, or of another version.
    """
    version: Any = None
    for line in lines:
        told: Any = json.loads(line)
        if version is None:
            version = told.get("version") if isinstance(told, dict) else None
            if version != VERSION:
                raise ValueError(f"an export of version {version!r}, this gpulaunch knows {VERSION}")
            continue
        yield Row(**told)


def _line(told: dict[str, Any]) -> str:
    try:
        return json.dumps(told, allow_nan=False)
    except ValueError:  # an event of the run's history may contain NaN, which is not JSON
        return json.dumps(sound(told), allow_nan=False)
