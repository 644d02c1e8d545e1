"""Writes the sidecar's states into telemetry.sqlite, in a thread that the sidecar never waits for.

The sidecar hands over each state and continues: a `Worker` takes the newest one when it is ready, and states in between
are not stored (the next one's counters include them). A state too soon after the previous one is held back for the same
reason, but stored if it turns out to be the last: of the run, of an attempt, of a rank. File errors never reach the
sidecar: they are reported as the condition of a collector and retried with increasing delay.
"""

from __future__ import annotations

import json
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gpulaunch.exporters.store import schema
from gpulaunch.exporters.store.attempt_facts import document_of
from gpulaunch.exporters.store.limits import Limits
from gpulaunch.exporters.store.locations import TELEMETRY_FILE
from gpulaunch.exporters.store.run_events import carry
from gpulaunch.exporters.store.schema import RefusedError, reason_of, set_aside
from gpulaunch.exporters.store.series import sample_of
from gpulaunch.exporters.store.timeline import Timeline
from gpulaunch.exporters.store.writing import HeldByReaderError, TelemetryFile
from gpulaunch.exporters.worker import Worker
from gpulaunch.profiler.record import AttemptGroup, CollectorState, NodeState

_DOCUMENT_EVERY_S: Final = 10.0
_SOON_S: Final = 1.0
"""Delay of the first document of an attempt."""
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


class TelemetryWriter:
    """Stores the telemetry of one node's run; one per sidecar."""

    def __init__(
        self, channel_dir: Path, *, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`channel_dir`: where the agent names the run directory."""
        self._channel_dir = channel_dir
        self._limits = limits or Limits()
        self._clock = clock
        self._worker: Worker[NodeState] = Worker("telemetry", self.write_now, clock=clock)
        # Used by the thread only:
        self._closing = False
        self._run_dir: Path | None = None
        self._file: TelemetryFile | None = None
        self._group: AttemptGroup | None = None
        self._timeline = Timeline(None)
        self._document: dict[str, Any] | None = None
        self._document_s = 0.0
        self._seen_s: float | None = None
        self._last: NodeState | None = None
        self._held_back: tuple[NodeState, float] | None = None
        """A state that came too soon after `_last`, and its time; None once a newer one has come."""
        self._refused = False
        self._retry_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        # Read by other threads: each is one value with one writing thread.
        self._available = True
        self._reason = ""
        self._errors = 0
        self._spent_s = 0.0

    @property
    def skipped(self) -> int:
        """States that were not stored because a newer one came before the thread was ready."""
        return self._worker.overtaken

    @property
    def condition(self) -> CollectorState:
        """Its condition, as one of the sidecar's collectors."""
        return CollectorState(
            available=self._available, reason=self._reason, errors=self._errors, spent_s=self._spent_s
        )

    def keep(self, state: NodeState) -> None:
        """Queue a state to be stored; returns at once."""
        if not self._worker.give(state):
            self._available = False
            self._errors += 1
            self._reason = f"{TELEMETRY_FILE}: no thread to write it"

    def close(self, within_s: float = 0.7) -> bool:
        """Store the last state and close the file; return whether that was done in time."""
        return self._worker.close(within_s)

    # -- the thread

    def write_now(self, state: NodeState | None, last: bool = False) -> None:
        """Store a state in the calling thread: what the thread does with the states of `keep`.

        Args:
            state: the state; None with `last`, if there is no newer one.
            last: it is the last one: close the file, too.
        """
        self._closing = last
        if state is not None:
            began_s = self._clock()
            self._try(state)
            self._spent_s += self._clock() - began_s
        if last:
            self._close(state)

    def _try(self, state: NodeState) -> None:
        if self._refused or self._clock() < self._retry_s:
            return
        try:
            self._store(state)
        except RefusedError as error:
            self._refused = True
            self._trouble(error)
        except Exception as error:  # a bug must not end the thread either
            damaged = schema.damages(error)
            self._trouble(error)
            if damaged:
                self._begin_anew()
        else:
            if self._file is not None:
                self._available, self._pause_s = True, _FIRST_PAUSE_S

    def _store(self, state: NodeState) -> None:
        if self._held_back is not None and self._file is not None and self._ends(self._held_back[0], state):
            self._write(self._file, *self._held_back)
        left = self._left(state)
        if state.group is not None:
            if self._group is None or state.group.run_id != self._group.run_id:
                self._document = None
            elif state.group.attempt != self._group.attempt:
                self._document = self._carried_on()
            self._group = state.group
        if self._group is None:
            return
        file = self._opened()
        if file is None:
            return
        now_s = self._timeline.at(state.taken_wall_ns / 1e9, state.taken_monotonic_ns / 1e9)
        too_soon = self._seen_s is not None and now_s - self._seen_s < file.apart_s
        if too_soon and left is None and not self._closing:
            self._held_back = state, now_s
        else:
            self._write(file, state, now_s, left=left, last=self._closing)

    def _write(
        self,
        file: TelemetryFile,
        state: NodeState,
        now_s: float,
        *,
        left: tuple[dict[str, Any], AttemptGroup, float] | None = None,
        last: bool = False,
    ) -> None:
        """Store a state of the group.

        Args:
            file: the file.
            state: the state.
            now_s: its time.
            left: what `_left` returned: the document of ranks that are gone.
            last: it is the last: store its document too, however recent the previous one is.
        """
        group = self._group
        if group is None:
            return
        sample = sample_of(state)
        earlier: NodeState | None
        if self._seen_s is None or now_s - self._seen_s >= 15.0:  # nothing could be written for a while
            since_s, earlier = now_s - 1.0, None
        else:
            since_s, earlier = self._seen_s, self._last
        with file.writing():
            run = file.run_of(group, host=_host(), now_s=now_s)
            if left is not None:
                document, of, at_s = left
                of_run = file.run_of(of, host=_host(), now_s=at_s)
                file.document(document, run=of_run, attempt=of.attempt, at_s=at_s)
            file.look(sample, run=run, attempt=group.attempt, begin_s=since_s, end_s=now_s)
            steps = _steps_between(earlier, state)
            file.findings(state.findings, run=run, now_s=now_s, steps=steps, judged=state.judged)
            if self._run_dir is not None:
                carry(file, self._run_dir)
            if self._document is None or last or now_s - self._document_s >= _DOCUMENT_EVERY_S:
                before = self._document or file.document_of(run, group.attempt)
                document = document_of(state, sample, before, at_s=now_s)
                file.document(document, run=run, attempt=group.attempt, at_s=now_s)
                self._document = document
                self._document_s = now_s if before else now_s - _DOCUMENT_EVERY_S + _SOON_S
        self._seen_s, self._last, self._held_back = now_s, state, None

    def _left(self, state: NodeState) -> tuple[dict[str, Any], AttemptGroup, float] | None:
        """Return the document of the last state, if it has ranks that are gone now."""
        last, group, at_s = self._last, self._group, self._seen_s
        if last is None or group is None or at_s is None or not self._ends(last, state):
            return None
        self._document = document_of(last, sample_of(last), self._document, at_s=at_s)
        return self._document, group, at_s

    def _ends(self, last: NodeState, state: NodeState) -> bool:
        """Whether `state` shows that the attempt of `last`, or one of its ranks, will have no newer state."""
        group = self._group
        there = {training.rank for training in state.training}
        same = (
            state.group is None
            or group is None
            or (state.group.run_id, state.group.attempt) == (group.run_id, group.attempt)
        )
        return not same or any(training.rank not in there for training in last.training)

    def _carried_on(self) -> dict[str, Any] | None:
        """Return what the next attempt's document inherits: counters, but not program lines and locations."""
        if self._document is None:
            return None
        return {**self._document, "ranks": {}, "gauges": []}

    def _opened(self) -> TelemetryFile | None:
        if self._file is None:
            if self._run_dir is None:
                self._run_dir = self._named()
            if self._run_dir is None:
                return None
            self._file = TelemetryFile(self._run_dir / TELEMETRY_FILE, self._limits)
            self._timeline = Timeline(self._file.newest_s)
            self._seen_s = None
        return self._file

    def _named(self) -> Path | None:
        """The run directory, which the agent names next to the channel's pages."""
        try:
            document: Any = json.loads((self._channel_dir / "group.json").read_bytes())
            return Path(document["run_dir"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _trouble(self, error: Exception) -> None:
        """Report the error, and retry after a pause."""
        self._available = False
        self._errors += 1
        self._reason = f"{TELEMETRY_FILE}: {_sentence(error)}"
        self._retry_s = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if isinstance(error, HeldByReaderError) and self._file is not None:
            return
        self._held_back = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin_anew(self) -> None:
        """Set a damaged file aside, for its content may be useful, so that a new one can be created."""
        if self._run_dir is None:
            return
        try:
            aside = set_aside(self._run_dir / TELEMETRY_FILE)
        except OSError as error:
            self._reason += f"; cannot set it aside: {reason_of(error)}"
            return
        self._reason += f"; set aside as {aside.name}, begun anew"
        self._retry_s = 0.0
        self._document = None

    def _close(self, last: NodeState | None) -> None:
        file = self._file
        if file is None:
            return
        try:
            if last is None:  # the last state is stored; its document, and the end of the history, may not be
                self._finish(file)
        except Exception as error:  # the run has ended anyway
            self._trouble(error)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _finish(self, file: TelemetryFile) -> None:
        """Store the end of the history, the document of the last state, and that state if it was held back."""
        if self._held_back is not None:
            self._write(file, *self._held_back, last=True)
            return
        group, last, at_s = self._group, self._last, self._seen_s
        with file.writing():
            if self._run_dir is not None:
                carry(file, self._run_dir)
            if group is not None and last is not None and at_s is not None:
                run = file.run_of(group, host=_host(), now_s=at_s)
                document = document_of(last, sample_of(last), self._document, at_s=at_s)
                file.document(document, run=run, attempt=group.attempt, at_s=at_s)


def _steps_between(before: NodeState | None, after: NodeState) -> int:
    """Return the most steps that any rank made in between; a rank that is new does not count."""
    were = {training.rank: training.steps for training in before.training} if before is not None else {}
    return max((max(0, each.steps - were.get(each.rank, each.steps)) for each in after.training), default=0)


def _host() -> str:
    return socket.gethostname()[:64]


def _sentence(error: Exception) -> str:
    known = isinstance(error, (OSError, sqlite3.Error, RefusedError, schema.DamagedError, HeldByReaderError))
    text = reason_of(error) if known else f"{type(error).__name__}"
    return text.removeprefix(f"{TELEMETRY_FILE} ")
