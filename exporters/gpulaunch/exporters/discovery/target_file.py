"""Announces a run without blocking on the directory, and removes the file at the end.

The directory is shared by Prometheus and all nodes: only a `Worker` touches it. A file that it could not remove is
removed by a later run, like that of a killed run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from gpulaunch.exporters.discovery.announce import Announcement
from gpulaunch.exporters.worker import Worker
from gpulaunch.profiler.record import AttemptGroup, NodeState

_GOODBYE_S: Final = 0.5
"""How long the end of a run waits for the removal of the file; `channel.ending` has the sidecar's total."""


class TargetFile:
    """Owns the thread, from the first state of a run on."""

    def __init__(self, announcement: Announcement, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._announcement = announcement
        self._worker: Worker[NodeState] = Worker("discovery", self._touch, clock=clock)
        # Read by other threads: each is one value with one writing thread.
        self._announced: AttemptGroup | None = None
        self._fault = ""

    def tell(self, state: NodeState) -> None:
        """Queue the announcement of this state's run; never blocks or raises."""
        if state.group is None or state.group == self._announced:
            return
        if not self._worker.give(state):
            self._fault = self._cannot("no thread to do it")

    @property
    def fault(self) -> str:
        """Why the file is missing, as one line; "" if it exists, or is not due."""
        return self._cannot("it does not answer") if self._worker.late_s else self._fault

    def close(self) -> None:
        """Remove the file; does not wait for a hanging directory."""
        self._worker.close(_GOODBYE_S)

    def _cannot(self, why: str) -> str:
        return f"cannot announce this run in {self._announcement.directory}: {why}"

    def _touch(self, newest: NodeState | None, last: bool) -> None:
        """Update the directory; runs in the thread."""
        try:
            if last:
                self._announcement.close(newest)
            elif newest is not None:
                self._announcement.tell(newest)
            fault = self._announcement.fault
        except Exception as error:  # a bug or a file system error: reported, and retried
            fault = self._cannot(type(error).__name__)
        self._fault = fault
        if newest is not None and not fault:
            self._announced = newest.group
