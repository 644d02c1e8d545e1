"""The report of a run that has just ended, written into its directory by a process that nobody waits for.

The launcher starts it as its last act and goes. It steps back behind everything else on the node, ends itself if it
takes too long, and leaves a whole report.html or none. Where the node is cleared with the launcher (a container, a
batch step) it may not get that far: `gpulaunch report RUN --html` writes the same page later.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["begin", "run"]

_LONGEST_S = 30
_LONGEST_CPU_S = 20
_NICE = 10
# `-P`: the user's directory must not shadow what is imported.
_ENTRY = "import sys; from gpulaunch.launcher.cli.report_page import run; sys.exit(run(sys.argv[1:]))"


def begin(run_dir: str) -> int | None:
    """Start the process, and return at once with its pid; None: it cannot be started, and there is no report."""
    argv = [sys.executable, "-P", "-c", _ENTRY, os.path.abspath(run_dir)]
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    try:
        return os.posix_spawn(argv[0], argv, os.environ, file_actions=null, setsid=True, setsigmask=())
    except OSError:
        return None


def run(argv: Sequence[str]) -> int:
    """Write the page of the run directory `argv[0]`: 0, or 1 if that failed or took too long."""
    _settle()
    try:
        from gpulaunch.launcher.cli.report import PAGE_FILE, as_page
        from gpulaunch.launcher.loop.files import write_text

        (run_dir,) = argv
        write_text(os.path.join(run_dir, PAGE_FILE), as_page(run_dir))
    except Exception:  # nobody listens: no report, then
        return 1
    return 0


def _settle() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(_LONGEST_S)
    with contextlib.suppress(OSError, ValueError):  # what may not be limited is limited by the alarm
        resource.setrlimit(resource.RLIMIT_CPU, (_LONGEST_CPU_S, _LONGEST_CPU_S))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def _too_long(*_: object) -> NoReturn:
    raise TimeoutError("the report took too long")
