"""Announces a run without waiting for the directory, and takes the file away in the end.

The directory is one that Prometheus and all nodes see: only a `Worker` touches it. A file that it could not take away
is removed by a later run, as that of a run that was killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from gpulaunch.exporters.discovery.announce import Announcement
from gpulaunch.exporters.worker import Worker
from gpulaunch.profiler.record import AttemptGroup, NodeState

_GOODBYE_S: Final = 0.5
"""How long the end of a run waits for the file to be gone; all of the sidecar's end is in `channel.ending`."""


class TargetFile:
    """Owns the thread, from the first state of a run on."""

    def __init__(self, announcement: Announcement, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._announcement = announcement
        self._worker: Worker[NodeState] = Worker("discovery", self._touch, clock=clock)
        # Told: each is one value that one thread writes.
        self._announced: AttemptGroup | None = None
        self._fault = ""

    def tell(self, state: NodeState) -> None:
        """Have the run of this state announced; waits for nothing, raises nothing."""
        if state.group is None or state.group == self._announced:
            return
        if not self._worker.give(state):
            self._fault = self._cannot("no thread to do it")

    @property
    def fault(self) -> str:
        """Why the file is not there, as one line; "" if it is, or is not due."""
        return self._cannot("it does not answer") if self._worker.late_s else self._fault

    def close(self) -> None:
        """Take the file away; a directory that hangs is not waited for."""
        self._worker.close(_GOODBYE_S)

    def _cannot(self, why: str) -> str:
        return f"cannot announce this run in {self._announcement.directory}: {why}"

    def _touch(self, newest: NodeState | None, last: bool) -> None:
        """Do what is due in the directory; in the thread."""
        try:
            if last:
                self._announcement.close(newest)
            elif newest is not None:
                self._announcement.tell(newest)
            fault = self._announcement.fault
        except Exception as error:  # a fault of ours, or of a file system: told, and tried again
            fault = self._cannot(type(error).__name__)
        self._fault = fault
        if newest is not None and not fault:
            self._announced = newest.group
