"""Derives attempts and run status from the lines of a run's history. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gpulaunch.exporters.view.model import AttemptView, CauseView, StallView, Status
from gpulaunch.exporters.view.values import whole

_MOST_ATTEMPTS: Final = 200
_REQUEUE: Final = 75
"""Exit code of a job that was asked to end, has saved a checkpoint, and continues when it is run again."""


@dataclass
class _Attempt:
    number: int
    """Within its run, from 0."""
    begin_s: float | None = None
    end_s: float | None = None
    status: Status = Status.UNKNOWN


@dataclass(kw_only=True)
class AttemptHistory:
    """The history of the newest launcher run in the directory, and of every attempt."""

    run_id: str = ""
    pid: object = None
    host: str = ""
    """Host of that process; "" if an older gpulaunch did not record it."""
    kernel: str = ""
    """The kernel in which its pid is valid (`profiler.kernel`); "" if unknown."""
    began_s: float | None = None
    ended_s: float | None = None
    set_s: float = 0.0
    """How far the wall clock has been set forward since, from the newest line that has it."""
    exit_code: int | None = None
    phase: str = ""
    ending: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The fields of `run_ended`."""
    first: int = 0
    """Its first attempt has the directory `attempts/<first>`."""
    resumed_step: int | None = None
    """Step of the checkpoint given to its newest attempt."""
    lost_work_unknown: bool = False
    """It is unknown which step one of its attempts resumed from."""
    hang_suspicions: int = 0
    hangs: int = 0
    stall: StallView | None = None
    preempted: bool = False
    told: str = ""
    """The first termination signal that its launcher received."""
    attempts: dict[int, _Attempt] = field(default_factory=dict[int, _Attempt])

    @property
    def status(self) -> Status:
        """How it ended, as the launcher recorded it."""
        if self.exit_code == 0:
            return Status.FINISHED
        return Status.STOPPED if self._was_stopped() else Status.FAILED

    @property
    def stopped_by(self) -> str:
        """The signal that ended it; "" if there was none, or another node received it."""
        return self.told if self.ended_s is not None and self.status is Status.STOPPED else ""

    def _was_stopped(self) -> bool:
        """A signal after a failure also ends a job, but is not the cause: the exit code is then the failure's."""
        codes = {_REQUEUE} if self.preempted else set[int]()
        # A node that is stopped by another one ends as after a SIGTERM.
        if told := self.told or ("SIGTERM" if self.preempted else ""):
            codes |= {128 + each.value for each in signal.Signals if each.name == told}
        return self.exit_code in codes

    def views(self, causes: Mapping[int, Mapping[str, Any]], status: Status) -> tuple[AttemptView, ...]:
        """Return the attempts, oldest first; `status`: that of the run."""
        views: list[AttemptView] = []
        newest = max(self.attempts, default=None)
        for number, attempt in sorted(self.attempts.items())[-_MOST_ATTEMPTS:]:
            of_run = attempt.status
            if of_run is Status.UNKNOWN and number == newest:
                of_run = status
            first = causes.get(number)
            if first is not None and of_run is not Status.RUNNING:
                of_run = Status.FAILED
            views.append(
                AttemptView(
                    number=attempt.number,
                    directory=number,
                    earlier=number < self.first,
                    status=of_run,
                    began_s=attempt.begin_s,
                    ended_s=attempt.end_s,
                    cause=cause_of(first) if first is not None else None,
                )
            )
        return tuple(views)


def history_of(
    lines: Sequence[Mapping[str, Any]], group: Mapping[str, Any], directories: Sequence[int]
) -> AttemptHistory:
    """Read the lines, oldest first.

    The lines count attempts from 0 in each launcher run; directories are numbered across runs, each run continuing
    after the previous one. For the newest attempt, group.json takes precedence.

    Args:
        lines: lines of events.jsonl.
        group: group.json, which has the number of the newest attempt.
        directories: numbers of the attempts that have a directory.
    """
    history = AttemptHistory()
    numbered: list[tuple[int, _Attempt]] = []
    base = highest = 0
    of_run = 0
    """Where the attempts of the newest run begin in `numbered`."""
    started: int | None = None
    """The newest of them whose ranks have started."""
    began_ahead_s: float | None = None
    for line in lines:
        what, at_s = str(line["event"]), float(line["time_s"])
        ahead_s = _ahead(line)
        if what == "run_started":
            if len(numbered) > of_run and numbered[-1][1].status is Status.UNKNOWN:
                numbered[-1][1].status = Status.LOST  # its run did not record how it ended
            base += highest if numbered else 0
            highest, of_run, started = 0, len(numbered), None
            attempts = history.attempts
            history = AttemptHistory(
                run_id=str(line.get("run_id", "")),
                pid=line.get("pid"),
                host=str(line.get("host", "")),
                kernel=str(line.get("kernel", "")),
                began_s=at_s,
                attempts=attempts,
            )
            began_ahead_s = ahead_s
        if ahead_s is not None and began_ahead_s is not None:
            history.set_s = ahead_s - began_ahead_s
        number = whole(line.get("attempt"))
        attempt: _Attempt | None = None
        if number is not None and 0 <= number < 1_000_000 and what in _OF_ATTEMPTS:
            begins = len(numbered) == of_run or numbered[-1][0] < base + number
            if begins and line.get("phase") in ("clearing", "done"):
                history.phase = str(line["phase"])  # not started: it has no directory
                continue
            highest = max(highest, number + 1)
            if begins:
                if len(numbered) > of_run:
                    _close(numbered[-1][1], at_s)
                numbered.append((base + number, _Attempt(number=number, begin_s=at_s)))
            attempt = numbered[-1][1]
            started = numbered[-1][0] if what == "started" else started
        match what:
            case "phase":
                history.phase = str(line.get("phase", ""))
                history.stall = None
                history.resumed_step = None if history.phase == "starting" else history.resumed_step
                if attempt is not None and history.phase in ("clearing", "done") and attempt.end_s is None:
                    attempt.end_s = at_s
            case "resuming":
                history.resumed_step = whole(line.get("step"))
            case "lost_work_unknown" | "lost_work_known":
                history.lost_work_unknown = what == "lost_work_unknown"
            case "hang_suspected" | "hung":
                history.hang_suspicions += what == "hang_suspected" and line.get("again") is not True
                history.hangs += what == "hung"
                history.stall = _stall_of(line, at_s)
            case "hang_over":
                history.stall = None
            case "signalled":
                history.preempted = history.preempted or line.get("preempted") is True
                history.told = history.told or str(line.get("signal", ""))
            case "run_ended":
                code = whole(line.get("exit_code"))
                history.ended_s, history.ending = at_s, line
                history.stall = None
                history.exit_code = code
                history.preempted = history.preempted or line.get("preempted") in (1, True)
                if len(numbered) > of_run:
                    last = numbered[-1][1]
                    last.end_s = last.end_s or at_s
                    last.status = history.status
            case _:
                pass
    said = whole(group.get("attempt"))
    shift = 0
    if said is not None and group.get("run_id") == history.run_id and started is not None:
        shift = max(0, said - started)  # group.json may not be rewritten yet
    history.first = base + shift
    for place, (number, attempt) in enumerate(numbered):
        history.attempts[number + (shift if place >= of_run else 0)] = attempt
    for number in directories:
        in_run = number - history.first if number >= history.first else number
        history.attempts.setdefault(number, _Attempt(number=in_run))
    return history


def cause_of(first: Mapping[str, Any]) -> CauseView:
    """Return the first cause from failure.json."""
    return CauseView(
        kind=str(first.get("kind", "other")),
        headline=str(first.get("headline", "")),
        rank=whole(first.get("rank")),
        why=str(first.get("why", "")),
        advice=str(first.get("advice", "")),
        report=str(first.get("report", "")),
    )


def _stall_of(line: Mapping[str, Any], at_s: float) -> StallView:
    """Return the stalled ranks of a line: until they move, or their attempt is ended for it."""
    quiet_s, due_in_s = (_seconds(line.get(name)) for name in ("quiet_s", "due_in_s"))
    due_s = at_s + due_in_s if due_in_s is not None else None
    return StallView(what=str(line.get("why", "")), since_s=at_s - (quiet_s or 0.0), due_s=due_s)


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e12 else None


_OF_ATTEMPTS = ("phase", "started", "rank_ended", "store_lost")


def _ahead(line: Mapping[str, Any]) -> float | None:
    """Return how far the wall clock is ahead of the monotonic clock."""
    own_s = line.get("monotonic_s")
    return float(line["time_s"]) - own_s if isinstance(own_s, (int, float)) and 0 <= own_s < 1e12 else None


def _close(attempt: _Attempt, at_s: float) -> None:
    """Mark an attempt as failed, since another attempt of the run begins."""
    attempt.end_s = attempt.end_s or at_s
    attempt.status = Status.FAILED
