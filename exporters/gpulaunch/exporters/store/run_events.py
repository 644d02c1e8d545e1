"""Copies the agent's events and failure causes from the run directory into telemetry.sqlite."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final, cast

from gpulaunch.exporters.store.bounded import sound
from gpulaunch.exporters.store.writing import TelemetryFile
from gpulaunch.profiler.files import regular

EVENTS_FILE: Final = "events.jsonl"
OF_ITS_HOST: Final = ("monotonic_s", "seen_s", "kernel")
"""Fields that are meaningful only on the node that wrote the line; the time for all nodes is `time_s`."""

_AT_ONCE_BYTES: Final = 1 << 20
_LARGEST_REPORT_BYTES: Final = 16 << 20
_LONGEST_LINE_BYTES: Final = 256 << 10
_PLACE: Final = "events.jsonl was read until"
_TELLS_OF_FAILURES: Final = frozenset(("phase", "run_ended", "started"))


def carry(file: TelemetryFile, run_dir: Path) -> None:
    """Copy what is new; call within `file.writing()`. What cannot be read is retried later."""
    at = file.noted(_PLACE)
    lines, place = read_lines(run_dir / EVENTS_FILE, at if isinstance(at, int) else 0)
    news = False
    for line in lines:
        what, at_s = line.pop("event", None), line.pop("time_s", None)
        if isinstance(what, str) and isinstance(at_s, (int, float)) and 0 <= at_s < 1e12:
            for name in ("version", *OF_ITS_HOST):
                line.pop(name, None)
            file.event(what, line, at_s=at_s)
            news = news or what in _TELLS_OF_FAILURES
    if place != at:
        file.note(_PLACE, place)
    if news:
        _carry_failures(file, run_dir / "attempts")


def read_lines(path: Path, place: int = 0, *, most_bytes: int = _AT_ONCE_BYTES) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines of a JSONL file from an offset on, and the next offset; restart if the file shrank.

    Lines that are not objects are skipped; an incomplete last line is left. The values are `sound`.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
            if place > size:
                place = 0
            file.seek(place)
            text: bytes = file.read(most_bytes)
    except OSError:
        return [], place
    end = text.rfind(b"\n") + 1
    if not end and len(text) >= _LONGEST_LINE_BYTES:
        end = len(text)  # gpulaunch writes no line this long
    lines: list[dict[str, Any]] = []
    for line in text[:end].split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            value: object = sound(json.loads(line))
            if isinstance(value, dict):
                lines.append(cast("dict[str, Any]", value))
    return lines, place + end


def first_cause(path: Path) -> dict[str, Any] | None:
    """Return `first` of a failure.json, with its attempt and time; None if it cannot be read."""
    try:
        with open(path, "rb", opener=regular) as file:
            document: Any = sound(json.loads(file.read(_LARGEST_REPORT_BYTES)))
        first = document["first"]
        if not isinstance(first, dict):
            return None
        return {
            **cast("dict[str, Any]", first),
            "exit_code": document.get("exit_code"),
            "started_wall_s": document.get("started_wall_s"),
            "attempt": document.get("attempt"),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _carry_failures(file: TelemetryFile, attempts: Path) -> None:
    try:
        numbers = sorted(int(name) for name in os.listdir(attempts) if name.isdecimal() and len(name) < 10)
    except OSError:
        return
    known = file.failures()
    for number in numbers[-50:]:
        path = attempts / str(number) / "failure.json"
        if number not in known and (first := first_cause(path)) is not None:
            try:
                at_s = os.stat(path).st_mtime
            except OSError:
                continue
            file.failure(number, first, at_s=at_s)
