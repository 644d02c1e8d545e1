"""Has what is found in a run written into its directory, while the run goes on.

The run directory may be on a file system of others, and that may hang: whoever calls it then waits in the kernel, for
minutes or for ever. So all that touches it is done by a thread of its own, which may be left there. It is handed what
stands now, the newest in the place of what it has not come to; what came and went while it hung is not in the file.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpulaunch.exporters.files.findings import FINDINGS_FILE, FindingsFile
from gpulaunch.profiler.files import read_file
from gpulaunch.profiler.record import Collector, Finding, NodeState

__all__ = ["FindingsKeeper"]

_LATE_S: Final = 10.0
"""A write that takes longer is told."""
_GOODBYE_S: Final = 0.5
"""How long the end of a run waits for the last write; all of the sidecar's is in `channel.ending`."""

_Seen = tuple[tuple[Finding, ...], float]


class FindingsKeeper:
    """Writes `findings.jsonl` from the first step on; a directory that cannot be written to is tried again."""

    def __init__(self, channel_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel_dir = channel_dir
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # around what follows
        self._newest: _Seen | None = None
        self._ending = False
        self._began_s: float | None = None
        self._trouble = ""
        self._errors = 0
        self._late_since_s: float | None = None
        # the thread's own
        self._file: FindingsFile | None = None

    def keep(self, state: NodeState) -> NodeState:
        """Take the findings that stand now, without waiting for anything; raises nothing.

        Returns:
            The state, its collector of findings saying what could not be written.
        """
        if self._thread is not None or any(training.steps for training in state.training):
            with self._changed:
                self._newest = state.findings, state.taken_wall_ns / 1e9
                self._changed.notify()
            self._start()
        return self._with_trouble(state)

    def close(self) -> None:
        """Write a last time; a file system that hangs is not waited for."""
        if self._thread is not None:
            with self._changed:
                self._ending = True
                self._changed.notify()
            self._thread.join(_GOODBYE_S)

    def _start(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="findings", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a control group that has no thread left for us; the next refresh tries again
            self._fail("no thread to write it")
        else:
            self._thread = thread

    def _with_trouble(self, state: NodeState) -> NodeState:
        with self._changed:
            trouble, began_s = self._trouble, self._began_s
            if began_s is not None and self._clock() - began_s > _LATE_S:
                if self._late_since_s != began_s:  # one error, however long it takes
                    self._late_since_s = began_s
                    self._errors += 1
                trouble = f"{FINDINGS_FILE}: not written for {self._clock() - began_s:.0f} s"
            errors = self._errors
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

    # -- the thread

    def _run(self) -> None:
        ending = False
        while not ending:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._ending)
                newest, self._newest = self._newest, None
                ending = self._ending
                self._began_s = self._clock()
            try:
                self._write(newest, ending=ending)
                trouble = ""
            except OSError as error:
                trouble = error.strerror or type(error).__name__
            except Exception as error:  # a fault of ours: told, and tried again with what comes next
                trouble = type(error).__name__
            with self._changed:
                self._began_s, self._trouble = None, ""
            if trouble:
                self._fail(trouble)

    def _write(self, newest: _Seen | None, *, ending: bool) -> None:
        if self._file is None:
            self._file = self._open()
        if newest is not None:
            self._file.tell(*newest)
        if ending:
            self._file.close()

    def _open(self) -> FindingsFile:
        """The file in the run directory, which the agent names beside the pages."""
        document: Any = json.loads(read_file(self._channel_dir / "group.json"))
        return FindingsFile(Path(document["run_dir"]) / FINDINGS_FILE)

    def _fail(self, trouble: str) -> None:
        with self._changed:
            self._trouble = f"{FINDINGS_FILE}: {trouble}"
            self._errors += 1
