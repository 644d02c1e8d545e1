"""Has what a run's sidecar sees written into telemetry.sqlite, by a thread that the sidecar never waits for.

The sidecar hands over each state and goes on: a `Worker` takes the newest one when it is ready for it, and what came
meanwhile is not stored (the counters of the next one have it). One that comes too soon after the one before is held
back for the same reason, and stored all the same if it turns out to be the last: of the run, of an attempt, of a rank.
Nothing that happens to the file reaches the sidecar: it is told as the condition of a collector, and tried again,
later and later.
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
"""The first document of an attempt comes so soon."""
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


class TelemetryWriter:
    """Keeps the telemetry of one node's run; one for each sidecar."""

    def __init__(
        self, channel_dir: Path, *, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`channel_dir`: where the agent says which run directory it is."""
        self._channel_dir = channel_dir
        self._limits = limits or Limits()
        self._clock = clock
        self._worker: Worker[NodeState] = Worker("telemetry", self._work, clock=clock)
        # Of the thread alone:
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
        """A look that came too soon after `_last`, and when: nothing newer has come so far."""
        self._refused = False
        self._retry_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        # Told: each is one value that one thread writes.
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
        """How it does, as one of the sidecar's collectors."""
        return CollectorState(
            available=self._available, reason=self._reason, errors=self._errors, spent_s=self._spent_s
        )

    def keep(self, state: NodeState) -> None:
        """Have a state stored; returns at once."""
        if not self._worker.give(state):
            self._available = False
            self._errors += 1
            self._reason = f"{TELEMETRY_FILE}: no thread to write it"

    def close(self, within_s: float = 0.7) -> bool:
        """Store what was handed over last, and let the file go; say whether that was done in time."""
        return self._worker.close(within_s)

    # -- the thread

    def _work(self, state: NodeState | None, last: bool) -> None:
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
        except Exception as error:  # a fault of ours must not end the thread, either
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
        """Store a look of the group's.

        Args:
            file: where.
            state: what was seen.
            now_s: when.
            left: what `_left` gave: the document that it leaves behind.
            last: it is the last: with its document, whenever that was stored.
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
        """The document of the last look, if there were ranks in it that are not there any more."""
        last, group, at_s = self._last, self._group, self._seen_s
        if last is None or group is None or at_s is None or not self._ends(last, state):
            return None
        self._document = document_of(last, sample_of(last), self._document, at_s=at_s)
        return self._document, group, at_s

    def _ends(self, last: NodeState, state: NodeState) -> bool:
        """Whether nothing newer will come of the attempt of `last`, or of a rank in it: `state` has come instead."""
        group = self._group
        there = {training.rank for training in state.training}
        same = (
            state.group is None
            or group is None
            or (state.group.run_id, state.group.attempt) == (group.run_id, group.attempt)
        )
        return not same or any(training.rank not in there for training in last.training)

    def _carried_on(self) -> dict[str, Any] | None:
        """What of an attempt's document is true of the next one: counters go on, lines and places begin anew."""
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
        """The run directory, which the agent names beside the pages."""
        try:
            document: Any = json.loads((self._channel_dir / "group.json").read_bytes())
            return Path(document["run_dir"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _trouble(self, error: Exception) -> None:
        """Tell, and try again after a pause."""
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
        """A damaged file is set aside: what it holds may be of use to somebody, and a new one can be begun."""
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
            if last is None:  # the last state is stored already; its document, and the end of the history, may not be
                self._finish(file)
        except Exception as error:  # it has ended anyway
            self._trouble(error)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _finish(self, file: TelemetryFile) -> None:
        """The end of the history, and the document of the last look; that look, too, if it was held back."""
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
    """How many steps the rank made that made most; none of those of a rank that was not there before are known."""
    were = {training.rank: training.steps for training in before.training} if before is not None else {}
    return max((max(0, each.steps - were.get(each.rank, each.steps)) for each in after.training), default=0)


def _host() -> str:
    return socket.gethostname()[:64]


def _sentence(error: Exception) -> str:
    known = isinstance(error, (OSError, sqlite3.Error, RefusedError, schema.DamagedError, HeldByReaderError))
    text = reason_of(error) if known else f"{type(error).__name__}"
    return text.removeprefix(f"{TELEMETRY_FILE} ")
