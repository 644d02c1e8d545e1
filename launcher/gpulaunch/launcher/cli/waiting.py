"""Shows on a terminal what a verb is doing while it takes long."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Generator

PATIENCE_S = 2.0
"""Longer waits are shown on a terminal."""
_AGAIN_S = 0.5
_COLUMNS = 80
"""Used if the terminal does not report its width."""
_BAR_CELLS = 20


class Activity:
    """The current activity, and the part of it that is done. Call it to change the activity."""

    def __init__(self, what: str, *, lasts_s: float | None = None) -> None:
        self._began_s = time.monotonic()
        self(what, lasts_s=lasts_s)

    def __call__(self, what: str, share: float | None = None, *, lasts_s: float | None = None) -> None:
        """Say `what` from now on.

        Args:
            what: a few words, in ASCII.
            share: the part that is done, from 0 to 1; None: unknown.
            lasts_s: how long it takes from now on, if only that is known.
        """
        self._told = what, share, lasts_s, time.monotonic()  # in one assignment: another thread reads it

    def line(self) -> str:
        """The line on the terminal."""
        what, share, lasts_s, since_s = self._told
        now_s = time.monotonic()
        if lasts_s:
            share = (now_s - since_s) / lasts_s
        shown = "" if share is None else f" {bar(share)}"
        return f"{what}{shown}, {now_s - self._began_s:.0f} s"


def bar(share: float) -> str:
    """A share as a bar of constant length."""
    share = min(1.0, max(0.0, share))
    full = int(share * _BAR_CELLS)
    return f"[{'#' * full:-<{_BAR_CELLS}}] {int(100 * share):3} %"


@contextlib.contextmanager
def show_activity(
    what: str, *, lasts_s: float | None = None, patience_s: float = PATIENCE_S, again_s: float = _AGAIN_S
) -> Generator[Activity]:
    """Show the current activity and its duration, once it takes longer than `patience_s`.

    Only on a terminal, on stderr, in one line that is erased afterwards. The block gets the function that changes the
    activity. Nothing waits for the terminal, and signals to this process are handled where they would be without this.

    Args:
        what: as of `Activity`.
        lasts_s: as of `Activity`.
        patience_s: how long nothing is shown.
        again_s: the interval between updates.
    """
    doing = Activity(what, lasts_s=lasts_s)
    if sys.stderr is None or not sys.stderr.isatty():
        yield doing
        return
    done = threading.Event()
    thread = threading.Thread(target=_tell, args=(doing, done, patience_s, again_s), daemon=True)
    try:
        # The thread inherits the signals blocked here. A caller that blocks signals in the block waits for them: they
        # must not be delivered to a thread that has them unblocked, and end the process.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield doing
    finally:
        done.set()
        if thread.ident is not None:  # Ctrl-C may have come before it was started
            thread.join()


def _tell(doing: Activity, done: threading.Event, patience_s: float, again_s: float) -> None:
    if done.wait(patience_s):
        return
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone
        terminal = _again(sys.stderr.fileno())
        try:
            width = (os.get_terminal_size(terminal).columns or _COLUMNS) - 1
            while True:
                _write(terminal, f"\r{doing.line()[:width]:<{width}}")
                if done.wait(again_s):
                    break
            _write(terminal, f"\r{'':<{width}}\r")
        finally:
            os.close(terminal)


def _again(fd: int) -> int:
    """A terminal, reopened so that no write to it blocks: one stopped by Ctrl-S may do so for long."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # it is another user's, as after `su`
        return os.dup(fd)


def _write(terminal: int, text: str) -> None:
    """Write temporary text; if there is no room, it is dropped."""
    room = select.poll()
    room.register(terminal, select.POLLOUT)
    with contextlib.suppress(BlockingIOError):
        if room.poll(0):
            os.write(terminal, text.encode("ascii", "replace"))
