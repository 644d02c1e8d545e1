"""What the reader asks of a running job: a command that is run beside the screen, its lines told as they come."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from gpulaunch.exporters.tui.cells import plain, without_colours

_LONGEST_LINE: Final = 4000
_END_S: Final = 2.0


class Task(Protocol):
    """Something that takes a while, and says how it goes."""

    def run(self, say: Callable[[str], None]) -> None:
        """Do it, on a thread of its own."""

    def stop(self) -> None:
        """End it soon; called from another thread, and perhaps when it is over."""


class Command:
    """A command, and what it prints."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self, say: Callable[[str], None]) -> None:
        """Run it to its end and say what it prints; in the end its exit code, unless that is 0."""
        try:
            with self._lock:
                if self._stopped:
                    return
                process = self._process = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # the terminal's keys are not for it
                )
        except OSError as error:
            say(f"cannot run {self._argv[0]}: {error.strerror}")
            return
        with process:
            assert process.stdout is not None, "asked for above"
            while told := process.stdout.readline(_LONGEST_LINE):
                say(plain(without_colours(told.decode("utf-8", "replace").rstrip("\r\n"))))
        if process.returncode:
            say(f"exit code {process.returncode}")

    def stop(self) -> None:
        """Interrupt it as Ctrl-C would, and kill it if that does not help."""
        with self._lock:
            self._stopped = True
            process = self._process
        if process is None or process.poll() is not None:
            return
        for signum in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
                return


class Errand:
    """One task at a time, on a thread of its own."""

    def __init__(self, task: Task, say: Callable[[str | None], None]) -> None:
        """`say` is called on the errand's thread, with a line, and in the end with None."""
        self._task = task
        self._say = say
        self._thread = threading.Thread(target=self._run, name="gpulaunch-top-errand", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End it; waits a moment."""
        self._task.stop()
        self._thread.join(0.5)

    def _run(self) -> None:
        try:
            self._task.run(self._say)
        except Exception as error:  # an errand that fails is told like any other
            self._say(plain(f"{type(error).__name__}: {error}"))
        finally:
            self._say(None)
