"""Reads in a separate thread: an unresponsive disk blocks neither keys nor the exit of the program.

The thread is a daemon, not one of asyncio's: those are joined when a program ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulaunch.exporters.tui.tail import LogPlace, Tail, read_tail
from gpulaunch.exporters.tui.text import plain
from gpulaunch.exporters.view.load import load_run
from gpulaunch.exporters.view.model import RunView, Status

_EVERY_S: Final = 1.0
_OVER_EVERY_S: Final = 5.0
"""A finished run may be restarted in its directory."""
_DUTY: Final = 5.0
"""Reading takes at most 1 / this of a core: a large run on a slow disk is read less often."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to read."""

    window_s: float | None = None
    log: LogPlace | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What was read."""

    view: RunView | None
    log: Tail | None
    window_s: float | None
    trouble: str = ""


class Reader:
    """Reads a run and the requested log at most once a second, and reports the result."""

    def __init__(
        self,
        run_dir: Path,
        tell: Callable[[Snapshot], None],
        *,
        load: Callable[[Path, float | None], RunView] | None = None,
        tail: Callable[[Path, LogPlace], Tail] = read_tail,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the run in `run_dir`; `tell` is called in the reader's thread."""
        self._run_dir = run_dir
        self._tell = tell
        self._load = load or _load
        self._tail = tail
        self._now = now
        self._request = Request()
        self._wake = threading.Event()
        self._closing = False
        self._since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="gpulaunch-top-reader", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def request(self, request: Request) -> None:
        """Read this from now on; never blocks."""
        if request != self._request:
            self._request = request
            self._wake.set()

    def close(self) -> None:
        """Stop reading; waits only briefly for a read in progress."""
        self._closing = True
        self._wake.set()
        self._thread.join(0.5)

    def busy_seconds(self) -> float:
        """Return how long the current read has been running; 0: none is."""
        since_s = self._since_s
        return 0.0 if since_s is None else self._now() - since_s

    def _run(self) -> None:
        view: RunView | None = None
        trouble, window_s = "", self._request.window_s
        read_s, pause_s = float("-inf"), _EVERY_S
        while not self._closing:
            self._wake.clear()
            request, log = self._request, None
            began_s = self._since_s = self._now()
            try:
                if began_s >= read_s + (pause_s if request.window_s == window_s else _EVERY_S):
                    read_s, window_s, pause_s = began_s, request.window_s, _EVERY_S
                    view = self._load(self._run_dir, window_s)
                    trouble = ""
                    usual_s = _EVERY_S if view.status is Status.RUNNING else _OVER_EVERY_S
                    pause_s = max(usual_s, _DUTY * (self._now() - began_s))
                if request.log is not None:
                    log = self._tail(self._run_dir, request.log)
            except Exception as error:  # of any kind: the previous data stays on the screen
                trouble = plain(f"cannot read the run: {type(error).__name__}: {error}")
            self._since_s = None
            if self._closing:
                return
            self._tell(Snapshot(view=view, log=log, window_s=window_s, trouble=trouble))
            soon = request.log is not None or self._request.window_s != window_s
            wait_s = (_EVERY_S if soon else pause_s) - (self._now() - began_s)
            self._wake.wait(max(0.05, wait_s))


def _load(run_dir: Path, window_s: float | None) -> RunView:
    return load_run(run_dir, window_s=window_s)
