"""The report of a run that has just ended, written into its directory by a process of its own: the launcher, which is
small, does not load what it takes.

It steps back behind everything else on the node, and leaves a whole report.html or none. The launcher waits for it, not
long, and it does not outlive the launcher. `gpulaunch report RUN --html` writes the page later, and with charts that
can be zoomed if their library is there: too much to lie in every run directory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from gpulaunch.launcher.cli.waiting import told_while
from gpulaunch.launcher.loop import linux

PAGE_FILE = "report.html"
"""In the run directory."""

_LONGEST_S = 8
"""How long it may take; it then removes what it has written of the page."""
_WAITED_S = _LONGEST_S + 2.0
"""How long the report may delay the end of a job."""
_NICE = 10
# `-P`: the user's directory must not shadow what is imported.
_ENTRY = "import sys; from gpulaunch.launcher.cli.report_page import run; sys.exit(run(sys.argv[1:]))"


def begin(run_dir: str) -> int | None:
    """Start the process, and return its pid at once; None: it cannot be started, and there is no report."""
    argv = [sys.executable, "-P", "-c", _ENTRY, os.path.abspath(run_dir), str(os.getpid())]
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
        with told_while(f"writing {PAGE_FILE}"):
            if not select.select([pidfd], [], [], _WAITED_S)[0]:
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
    except Exception:  # no caller to report to: there is no report then
        return 1
    return 0


def _settle(launcher: int) -> None:
    linux.die_with_parent(launcher)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(_LONGEST_S)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def _too_long(*_: object) -> NoReturn:
    raise TimeoutError("the report took too long")
