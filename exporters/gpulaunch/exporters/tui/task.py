"""Runs commands for the user, such as a dump or a trace, in the background, streaming their output lines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from gpulaunch.exporters.tui.text import plain, without_colours

_LONGEST_LINE: Final = 4000
_END_S: Final = 2.0


class Task(Protocol):
    """A long-running task that reports its progress."""

    def run(self, say: Callable[[str], None]) -> None:
        """Run the task, in a separate thread."""

    def stop(self) -> None:
        """Stop it soon; called from another thread, possibly after it has ended."""


class Command:
    """A command and its output."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self, say: Callable[[str], None]) -> None:
        """Run it to its end and report its output, then its exit code unless that is 0."""
        try:
            with self._lock:
                if self._stopped:
                    return
                process = self._process = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that terminal signals such as Ctrl-C do not reach it
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
        """Interrupt it like Ctrl-C, and kill it if it does not end."""
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


class BackgroundTask:
    """A task in a separate thread."""

    def __init__(self, task: Task, say: Callable[[str | None], None]) -> None:
        """`say` is called in the task's thread with each line, and at the end with None."""
        self._task = task
        self._say = say
        self._thread = threading.Thread(target=self._run, name="gpulaunch-top-task", daemon=True)

    def start(self) -> None:
        """Start the task."""
        self._thread.start()

    def close(self) -> None:
        """Stop it; waits briefly."""
        self._task.stop()
        self._thread.join(0.5)

    def _run(self) -> None:
        try:
            self._task.run(self._say)
        except Exception as error:  # a failure is reported like other output
            self._say(plain(f"{type(error).__name__}: {error}"))
        finally:
            self._say(None)
