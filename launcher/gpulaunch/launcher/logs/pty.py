"""Opens a terminal for the only rank that prints to ours."""

from __future__ import annotations

import contextlib
import fcntl
import os
import termios


def open_terminal(window_size: bytes) -> tuple[int, int] | None:
    """Our end and the rank's end of a new terminal; None if the system has none left.

    It passes on output unchanged: our own terminal makes `\\r\\n` of `\\n`, and files keep `\\n`.
    """
    try:
        ours, theirs = os.openpty()  # not the controlling terminal of any process: O_NOCTTY
    except OSError:
        return None
    modes = termios.tcgetattr(theirs)
    modes[1] &= ~termios.OPOST
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    set_window_size(ours, window_size)
    return ours, theirs


def set_window_size(fd: int, window_size: bytes) -> None:
    """Set the size from another terminal's `struct winsize`."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, window_size)
