"""Writes the report of a run that has just ended into its directory, in a separate process: the launcher stays small
and does not import the modules for it.

The process has a low priority, and writes a complete report.html or none. The launcher waits for it for a limited time,
and it does not outlive the launcher. `gpulaunch report RUN --html` writes the page later, with interactive charts if
their library is installed: too large for every run directory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from gpulaunch.launcher.cli.waiting import show_activity
from gpulaunch.launcher.loop import linux

PAGE_FILE = "report.html"
"""In the run directory."""

WRITE_TIMEOUT_S = 8
"""How long it may take; it then removes what it has written of the page."""
WAIT_TIMEOUT_S = WRITE_TIMEOUT_S + 2.0
"""How long the report may delay the end of a job."""
_NICE = 10
ENTRY = "import sys; from gpulaunch.launcher.cli.report_page import run; sys.exit(run(sys.argv[1:]))"
"""The program of the process; run with `-P`: the user's directory must not shadow what is imported."""


def begin(run_dir: str) -> int | None:
    """Start the process, and return its pid at once; None: it cannot be started, and there is no report."""
    argv = [sys.executable, "-P", "-c", ENTRY, os.path.abspath(run_dir), str(os.getpid())]
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    try:
        return os.posix_spawn(argv[0], argv, os.environ, file_actions=null, setsigmask=())
    except OSError:
        return None


def wait(pid: int) -> bool:
    """Wait until the process has ended, or kill it at its deadline; return whether it has written the page.

    On a terminal, the wait is shown.
    """
    pidfd = os.pidfd_open(pid)
    try:
        with show_activity(f"writing {PAGE_FILE}"):
            if not select.select([pidfd], [], [], WAIT_TIMEOUT_S)[0]:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def run(argv: Sequence[str]) -> int:
    """Write the page of the run directory `argv[0]` for the process `argv[1]`: 0; 1: it failed, or took too long."""
    run_dir, launcher = argv
    _settle(int(launcher))
    try:
        from gpulaunch.launcher.cli.report_document import as_page
        from gpulaunch.launcher.loop.files import write_text

        write_text(os.path.join(run_dir, PAGE_FILE), as_page(run_dir, static=True))
    except Exception:  # no caller to report to: then there is no report
        return 1
    finally:
        signal.alarm(0)  # the handler is gone before the interpreter is
    return 0


def _settle(launcher: int) -> None:
    linux.die_with_parent(launcher)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(WRITE_TIMEOUT_S)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def _too_long(*_: object) -> NoReturn:
    raise TimeoutError("the report took too long")
