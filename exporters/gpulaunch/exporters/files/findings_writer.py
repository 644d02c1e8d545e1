"""Writes the findings of a run into its directory, during the run, without blocking the sidecar.

The run directory may be on a network file system: only a `Worker` touches it. It gets the active findings; those that
came and went while it hung are not in the file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpulaunch.exporters.files.findings import FINDINGS_FILE, FindingsFile
from gpulaunch.exporters.worker import Worker
from gpulaunch.profiler.files import read_file
from gpulaunch.profiler.record import Collector, Finding, NodeState

_Seen = tuple[tuple[Finding, ...], float, bool]


class FindingsWriter:
    """Writes `findings.jsonl` from the first step on; an unwritable directory is retried."""

    def __init__(self, channel_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel_dir = channel_dir
        self._worker: Worker[_Seen] = Worker("findings", self._work, clock=clock)
        self._begun = self._late = False
        self._times_late = 0
        # Used by the thread only:
        self._file: FindingsFile | None = None
        # Read by other threads: each is one value with one writing thread.
        self._trouble = ""
        self._errors = 0

    def keep(self, state: NodeState) -> NodeState:
        """Take the active findings, without blocking; never raises.

        Returns:
            The state, with write errors in its collector of findings.
        """
        self._begun = self._begun or any(training.steps for training in state.training)
        if self._begun and not self._worker.give((state.findings, state.taken_wall_ns / 1e9, state.judged)):
            self._fail("no thread to write it")
        return self._with_trouble(state)

    def close(self, within_s: float = 0.5) -> None:
        """Write one last time; does not wait longer for a hanging file system."""
        self._worker.close(within_s)

    def _with_trouble(self, state: NodeState) -> NodeState:
        late_s = self._worker.late_s
        self._times_late += late_s > 0 and not self._late  # one error, however long it takes
        self._late = late_s > 0
        trouble = f"{FINDINGS_FILE}: not written for {late_s:.0f} s" if self._late else self._trouble
        errors = self._errors + self._times_late
        condition = state.collectors.get(Collector.FINDINGS)
        if condition is None or not errors:
            return state
        told = replace(
            condition,
            available=condition.available and not trouble,
            reason=trouble or condition.reason,
            errors=condition.errors + errors,
        )
        return replace(state, collectors={**state.collectors, Collector.FINDINGS: told})

    def _fail(self, trouble: str) -> None:
        self._errors += 1  # before the reason is set
        self._trouble = f"{FINDINGS_FILE}: {trouble}"

    # -- the thread

    def _work(self, newest: _Seen | None, last: bool) -> None:
        try:
            self._write(newest, last=last)
        except OSError as error:
            self._fail(error.strerror or type(error).__name__)
        except Exception as error:  # a bug: reported, and retried with the next state
            self._fail(type(error).__name__)
        else:
            self._trouble = ""

    def _write(self, newest: _Seen | None, *, last: bool) -> None:
        if self._file is None:
            self._file = self._open()
        if newest is not None:
            self._file.tell(*newest)
        if last:
            self._file.close()

    def _open(self) -> FindingsFile:
        """Open the file in the run directory, which the agent names next to the channel's pages."""
        document: Any = json.loads(read_file(self._channel_dir / "group.json"))
        return FindingsFile(Path(document["run_dir"]) / FINDINGS_FILE)
