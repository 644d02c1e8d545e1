"""Reads the agent's files in a run directory, tolerating missing or damaged ones."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from gpulaunch.exporters.store.bounded import sound
from gpulaunch.exporters.store.locations import may_be_there
from gpulaunch.exporters.store.run_events import EVENTS_FILE, first_cause, read_lines
from gpulaunch.profiler.files import regular

_LARGEST_BYTES: Final = 32 << 20
_HISTORY_BYTES: Final = 8 << 20
_MOST_ATTEMPTS: Final = 200


@dataclass(kw_only=True)
class RunFiles:
    """The files of one node's run directory; an unreadable one is empty, and in the notes."""

    run_dir: Path
    job: dict[str, Any] = field(default_factory=dict[str, Any])
    group: dict[str, Any] = field(default_factory=dict[str, Any])
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    attempts: list[int] = field(default_factory=list[int])
    """Numbers of the attempt directories."""
    causes: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """First causes, by directory number."""
    touched_s: float | None = None
    """When the history was written to last."""
    notes: list[str] = field(default_factory=list[str])


def read_files(run_dir: Path) -> RunFiles:
    """Read all files."""
    files = RunFiles(run_dir=run_dir)
    try:
        there = set(os.listdir(run_dir))
    except OSError as error:
        files.notes.append(f"cannot read {run_dir}: {error.strerror}")
        return files
    files.job = _object(files, "job.json", missing="job.json is missing: the requested job is unknown")
    files.group = _object(files, "group.json")
    files.summary = _object(files, "summary.json")
    _read_history(files, there)
    _read_attempts(files)
    return files


def holds(pid: object, directory: Path) -> bool | None:
    """Whether a process has this directory open, as an agent has its run directory; None: unknown."""
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        return None
    descriptors = f"/proc/{pid}/fd"
    try:
        wanted = os.stat(directory)
        names = os.listdir(descriptors)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    for name in names:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(os.path.join(descriptors, name)), wanted):
                return True
    return False


def _object(files: RunFiles, name: str, *, missing: str = "") -> dict[str, Any]:
    try:
        with open(files.run_dir / name, "rb", opener=regular) as file:
            content: object = sound(json.loads(file.read(_LARGEST_BYTES)))
        if isinstance(content, dict):
            return cast("dict[str, Any]", content)
        files.notes.append(f"{name} is damaged")
    except FileNotFoundError:
        if missing:
            files.notes.append(missing)
    except OSError as error:
        files.notes.append(f"{name} cannot be read: {error.strerror}")
    except (ValueError, RecursionError):
        files.notes.append(f"{name} is damaged")
    return {}


def _read_history(files: RunFiles, there: set[str]) -> None:
    if EVENTS_FILE not in there:
        files.notes.append(f"{EVENTS_FILE} is missing: the run's history is unknown")
        return
    path = files.run_dir / EVENTS_FILE
    try:
        status = os.stat(path)
    except OSError as error:
        files.notes.append(f"{EVENTS_FILE} cannot be read: {error.strerror}")
        return
    files.touched_s = status.st_mtime
    place = max(0, status.st_size - _HISTORY_BYTES)
    files.events = [
        line
        for line in read_lines(path, place, most_bytes=_HISTORY_BYTES)[0]
        if isinstance(line.get("event"), str) and _is_time(line.get("time_s"))
    ]
    if not files.events:
        files.notes.append(f"{EVENTS_FILE} is {'damaged' if status.st_size else 'empty'}: the run's history is unknown")


def _read_attempts(files: RunFiles) -> None:
    directory = files.run_dir / "attempts"
    with contextlib.suppress(OSError):
        files.attempts = sorted(int(name) for name in os.listdir(directory) if name.isdecimal() and len(name) < 10)
    for number in files.attempts[-_MOST_ATTEMPTS:]:
        path = directory / str(number) / "failure.json"
        first = first_cause(path)
        if first is not None:
            files.causes[number] = {**first, "report": str(path)}
        elif may_be_there(path):
            how = "is damaged" if os.access(path, os.R_OK) else "cannot be read"
            files.notes.append(f"attempts/{number}/failure.json {how}: the reason of that failure is unknown")


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12
