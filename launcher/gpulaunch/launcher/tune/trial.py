"""Runs one trial: a job of its own, watched through its ranks' segments, and ended once it has made its steps."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpulaunch.launcher.runs.processes import RunError, read_group
from gpulaunch.profiler.channel.clock import monotonic_ns
from gpulaunch.profiler.channel.segment import SegmentReader
from gpulaunch.profiler.channel.segment_writer import SegmentError
from gpulaunch.profiler.samplers.facts import FactsFile

OUTPUT_FILE: Final = "output.log"
_LOOK_S: Final = 0.02
_END_S: Final = 30.0
"""For the job to end once it was asked to; then it is killed, and its ranks with it."""
_LEAST_FREE_BYTES: Final = 1 << 30
_LEAST_FREE: Final = 0.05
"""Of the disk for the trials' directories."""
_MOST_FILE_BYTES: Final = 1 << 16
_MOST_OUTPUT_BYTES: Final = 1 << 13


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps that trials measure: all of a job's trials the same."""

    first: int
    """Steps that are made before: the warm-up."""
    count: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """A rank after a step, by its own record."""

    steps: int
    at_ns: int
    step_ns: int
    """All steps so far."""
    phase_ns: Mapping[str, int]
    """Of these, by phase of `layout.PHASES`."""
    epochs: int
    """Passes over a DataLoader with workers that have begun."""


@dataclass
class Watched:
    """What a trial showed."""

    points: list[Point] = field(default_factory=list[Point])
    """Of the rank that has made the fewest steps, one for each look that found more of them."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of rank 0, the newest."""
    started_ns: int = 0
    """When the trial was started (CLOCK_MONOTONIC)."""
    code: int | None = None
    """The exit code of a job that ended by itself; None: it was ended."""
    error: str = ""
    """What it said why, if it failed."""
    late: bool = False
    """It took too long."""
    full: str = ""
    """What to do about the disk that it was about to fill; "": it was not."""

    def after(self, steps: int) -> Point | None:
        """The first point with so many steps; None: it did not make them."""
        return next((point for point in self.points if point.steps >= steps), None)

    def between(self, steps: Steps) -> tuple[Point, Point] | None:
        """The points at the begin and the end of the measured steps; None if it did not make them."""
        begin, end = self.after(steps.first), self.after(steps.first + steps.count)
        return None if begin is None or end is None or end.steps <= begin.steps else (begin, end)


Start = Callable[[str, Mapping[str, str], tuple[int, int, int]], int]
"""Starts a trial, given its run directory, environment, and stdin, stdout and stderr; its pid. Raises OSError."""


def watch(
    start: Start,
    env: Mapping[str, str],
    run_dir: str,
    *,
    is_enough: Callable[[Watched], bool],
    is_interrupted: Callable[[], bool],
    longest_s: float,
) -> Watched:
    """Run a job until it has shown enough, and end it.

    Args:
        start: starts the job.
        env: its environment.
        run_dir: its run directory; what it prints goes to a file there.
        is_enough: asked after each step; also whether it makes sense to go on.
        is_interrupted: asked all the time; then it is ended at once.
        longest_s: after this time it is ended in any case.

    Raises:
        OSError: it cannot be started.
    """
    seen = Watched(started_ns=monotonic_ns())
    os.makedirs(run_dir, mode=0o700, exist_ok=True)
    with (
        open(os.path.join(run_dir, OUTPUT_FILE), "wb") as output,
        open(os.devnull, "rb") as nothing,
    ):
        pid = start(run_dir, env, (nothing.fileno(), output.fileno(), output.fileno()))
    pidfd = os.pidfd_open(pid)
    try:
        with contextlib.closing(_looks(run_dir)) as looks:
            while not _ended(pidfd, _LOOK_S):
                point, facts = next(looks)
                if point is not None:
                    seen.points.append(point)
                    seen.facts = facts or seen.facts
                    if is_enough(seen):
                        break
                if is_interrupted():
                    break
                seen.full = _nearly_full(run_dir)
                seen.late = monotonic_ns() - seen.started_ns > longest_s * 1e9
                if seen.full or seen.late:
                    break
            else:
                _, status = os.waitpid(pid, 0)
                pid, seen.code = 0, os.waitstatus_to_exitcode(status)
                seen.error = _error_of(run_dir)
    finally:
        if pid:
            _end(pid, pidfd)
        os.close(pidfd)
    return seen


def _nearly_full(directory: str) -> str:
    """What to do if a trial fills the disk: an overlay copies a whole file when it is opened for writing."""
    disk = os.statvfs(directory)
    free_bytes, all_bytes = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    if free_bytes >= min(_LEAST_FREE_BYTES, _LEAST_FREE * all_bytes):
        return ""
    return f"what trials write fills {os.path.dirname(directory)}: set TMPDIR to a larger disk, or use --in-place"


def _ended(pidfd: int, timeout_s: float) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])


def _end(pid: int, pidfd: int) -> None:
    """End the job as Ctrl-C would: its ranks are not asked to save. Twice means at once."""
    for signum in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signum)
        if _ended(pidfd, _END_S):
            break
    os.waitpid(pid, 0)


def _looks(run_dir: str) -> Generator[tuple[Point | None, Mapping[str, Any]]]:
    """At each look the slowest rank's newest point if it has made more steps, else None; and rank 0's facts."""
    facts: FactsFile | None = None
    made = 0
    with contextlib.ExitStack() as opened:
        segments: list[SegmentReader] = []
        while True:
            if not segments and (channel := _channel_of(run_dir)) is not None:
                directory, ranks = channel
                with contextlib.suppress(OSError, SegmentError):
                    segments = [opened.enter_context(SegmentReader(f"{directory}/rank-{rank}.bin")) for rank in ranks]
                    facts = FactsFile(Path(directory, "facts-0.json"))
            point = None
            with contextlib.suppress(OSError, SegmentError):  # the job ends
                point = min((_point(each) for each in segments), key=lambda each: each.steps, default=None)
            if point is None or point.steps <= made:
                yield None, {}
                continue
            made = point.steps
            yield point, _read(facts)


def _channel_of(run_dir: str) -> tuple[str, list[int]] | None:
    with contextlib.suppress(RunError):
        group = read_group(run_dir)
        if group is not None and group.channel_dir:
            return group.channel_dir, sorted(group.ranks)
    return None


def _point(segment: SegmentReader) -> Point:
    seen = segment.read()
    return Point(
        steps=seen.steps,
        at_ns=seen.last_step_monotonic_ns,
        step_ns=seen.step_ns_total,
        phase_ns=seen.phase_ns,
        epochs=seen.loader.epochs,
    )


def _read(facts: FactsFile | None) -> Mapping[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return facts.read() if facts is not None else {}
    return {}


def last_output(directory: str) -> str:
    """The end of what the newest trial below a directory printed, for one that failed."""
    trials = sorted(Path(directory).glob(f"*/{OUTPUT_FILE}"), key=lambda each: each.stat().st_mtime)
    return _tail(str(trials[-1])) if trials else ""


def _tail(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_OUTPUT_BYTES))
        return file.read().decode(errors="replace")
    return ""


def _error_of(run_dir: str) -> str:
    """Why a job failed, by its own account."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        with open(os.path.join(run_dir, "summary.json"), "rb") as file:
            document: Any = json.loads(file.read(_MOST_FILE_BYTES))
        if error := " ".join(str(document.get("error") or "").split()):
            return error
    lines = _tail(os.path.join(run_dir, OUTPUT_FILE)).split("\n")  # it did not get as far as a run
    told = (line.removeprefix("[gpulaunch] ").strip() for line in reversed(lines))
    return next((line for line in told if any(each.isalpha() for each in line)), "")
