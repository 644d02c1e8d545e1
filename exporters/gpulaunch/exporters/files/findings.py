"""Writes and reads findings.jsonl of a run directory: all findings of the run, one object per line.

The file is the state, not a log: a line per finding, with when it was first and last seen and whether it is active. So
it stays small however long the job runs, and is complete whenever it is read. It is created empty as soon as profiling
starts, to distinguish "nothing found" from "not profiled".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from gpulaunch.exporters.store.bounded import sound
from gpulaunch.profiler.files import regular, write_file
from gpulaunch.profiler.record import Finding

FINDINGS_FILE: Final = "findings.jsonl"
_VERSION: Final = 1
_WRITE_EVERY_S: Final = 30.0
_MOST: Final = 200
_LARGEST_FILE_BYTES: Final = 4 << 20

_Key = tuple[str, str, int, str]


@dataclass
class _Line:
    told: Mapping[str, Any]
    first_seen_s: float
    last_seen_s: float
    active: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            **self.told,
            "active": self.active,
            "first_seen_s": round(self.first_seen_s, 3),
            "last_seen_s": round(self.last_seen_s, 3),
        }


class FindingsFile:
    """Writes the findings of a run as they come and go; continues the file of an earlier sidecar."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[_Key, _Line] = {}
        self._written_s: float | None = None
        for told in read_findings(path):
            line = _Line(told, told["first_seen_s"], told["last_seen_s"], active=bool(told["active"]))
            self._lines[_key(told)] = line

    def tell(self, standing: Iterable[Finding], now_s: float, judged: bool = True) -> None:
        """Take the active findings (at a Unix time); write if any has come or gone, or periodically.

        While nothing could be `judged` yet, the findings of an earlier sidecar stay active.

        Raises:
            OSError: the file could not be written; the next call retries.
        """
        news = self._written_s is None or abs(now_s - self._written_s) >= _WRITE_EVERY_S
        seen: set[_Key] = set()
        for finding in standing:
            key = finding.key
            seen.add(key)
            line = self._lines.get(key)
            news = news or line is None or not line.active
            first_seen_s = now_s if line is None else line.first_seen_s
            self._lines[key] = _Line(finding.as_json(), first_seen_s, now_s, active=True)
        for key, line in self._lines.items():
            if judged and line.active and key not in seen:
                line.active, news = False, True
        self._forget_oldest()
        if news:
            self._written_s = None  # if this fails, the next call retries
            self._write()
            self._written_s = now_s

    def close(self) -> None:
        """Write one last time. Raises OSError."""
        if self._written_s is not None:
            self._write()

    def _forget_oldest(self) -> None:
        """Limit the number of findings: keys contain program lines, and a program may generate lines endlessly."""
        for key in sorted(self._lines, key=lambda key: self._lines[key].last_seen_s)[
            : max(0, len(self._lines) - _MOST)
        ]:
            del self._lines[key]

    def _write(self) -> None:
        write_file(self._path, (json.dumps(line.as_json()) + "\n" for line in self._lines.values()))


def read_findings(path: Path, notes: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the findings of a file; invalid entries are skipped, and there are none without a regular file.

    Args:
        path: the file.
        notes: receives a line for what exists but could not be read.
    """
    notes = [] if notes is None else notes
    name = f"{path.parent.name}/{path.name}" if path.parent.name.startswith("node-") else path.name
    try:
        with open(path, "rb", opener=regular) as file:
            text = file.read(_LARGEST_FILE_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{name} cannot be read: {error.strerror}")
        return []
    found: list[dict[str, Any]] = []
    damaged = other = 0
    for line in text.splitlines():
        try:
            value: object = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        told = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        if _is_finding(told):
            found.append(sound(told))
        elif isinstance(told.get("version"), int) and told["version"] != _VERSION:
            other += 1
        else:
            damaged += 1
    if damaged:
        notes.append(f"{name} is damaged: {damaged} of its lines cannot be read")
    if other:
        notes.append(f"{name} is of another gpulaunch in {other} of its lines: this one knows version {_VERSION}")
    return found


_NUMBERS: Final = ("seconds_per_step", "seconds_per_hour", "confidence", "first_seen_s", "last_seen_s")
_LARGEST: Final = 1e15  # JSON allows numbers that cannot be formatted
_FIELDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "rule": str,
    "file": (str, type(None)),
    "line": (int, type(None)),
    "subject": str,
    "ranks": list,
    **dict.fromkeys(_NUMBERS, (int, float)),
    "evidence": dict,
    "advice": str,
    "active": bool,
}


def _is_finding(told: Mapping[str, Any]) -> bool:
    return (
        told.get("version") == _VERSION
        and all(isinstance(told.get(name, ...), of) for name, of in _FIELDS.items())
        and all(abs(told[name]) <= _LARGEST for name in _NUMBERS)  # false for NaN
    )


def _key(told: Mapping[str, Any]) -> _Key:
    return told["rule"], told["file"] or "", told["line"] or 0, told["subject"]
