"""Announces a run without waiting for the directory, and takes the file away in the end.

A directory that Prometheus and all nodes see is on a file system of others, and that may hang: whoever touches it then
waits in the kernel, for minutes or for ever. So only a thread of its own does, which may be left there. A file that it
could not take away is removed by a later run, as that of a run that was killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from gpulaunch.exporters.discovery.announce import Announcement
from gpulaunch.profiler.record import Group, NodeState

__all__ = ["AnnouncementKeeper"]

_LATE_S: Final = 10.0
"""A directory that takes longer is told."""
_GOODBYE_S: Final = 0.5
"""How long the end of a run waits for the file to be gone; all of the sidecar's end is in `channel.ending`."""


class AnnouncementKeeper:
    """Owns the thread, from the first state of a run on."""

    def __init__(self, announcement: Announcement, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._announcement = announcement
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # around what follows
        self._newest: NodeState | None = None
        self._announced: Group | None = None
        self._ending = False
        self._began_s: float | None = None
        self._fault = ""

    def tell(self, state: NodeState) -> None:
        """Have the run of this state announced; waits for nothing, raises nothing."""
        if state.group is None:
            return
        with self._changed:
            if state.group == self._announced:
                return
            self._newest = state
            self._changed.notify()
        if self._thread is None:
            self._start()

    @property
    def fault(self) -> str:
        """Why the file is not there, as one line; "" if it is, or is not due."""
        with self._changed:
            if self._began_s is not None and self._clock() - self._began_s > _LATE_S:
                return f"cannot announce this run in {self._announcement.directory}: it does not answer"
            return self._fault

    def close(self) -> None:
        """Take the file away; a directory that hangs is not waited for."""
        if self._thread is not None:
            with self._changed:
                self._ending = True
                self._changed.notify()
            self._thread.join(_GOODBYE_S)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="discovery", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a control group that has no thread left for us; the next refresh tries again
            self._fault = f"cannot announce this run in {self._announcement.directory}: no thread to do it"
        else:
            self._thread = thread

    # -- the thread

    def _run(self) -> None:
        ending = False
        while not ending:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._ending)
                newest, self._newest = self._newest, None
                ending = self._ending
                self._began_s = self._clock()
            fault = self._touch(newest, ending=ending)
            with self._changed:
                self._began_s, self._fault = None, fault
                if newest is not None and not fault:
                    self._announced = newest.group

    def _touch(self, newest: NodeState | None, *, ending: bool) -> str:
        """Do what is due in the directory; give what is wrong."""
        try:
            if ending:
                self._announcement.close()
            elif newest is not None:
                self._announcement.tell(newest)
        except Exception as error:  # a fault of ours, or of a file system: told, and tried again
            return f"cannot announce this run in {self._announcement.directory}: {type(error).__name__}"
        return self._announcement.fault
