"""`gpulaunch _stacks`: the helper process that inspects suspected ranks; only the agent starts it.

It is a separate process because its work takes seconds and may hang: it waits for py-spy, queries a socket of the
rank, reads /proc of processes in any state. The agent kills it when it takes too long. See `hang.helper`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from gpulaunch.launcher.loop import linux

PROCESS_TITLE = "gpulaunch-look"  # at most 15 characters: the kernel's limit for a comm
_NICE = 5


def run() -> int:
    """Answer the agent's requests on stdin until it closes that."""
    for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the agent ends it: by closing its stdin, or by SIGKILL
    linux.set_comm(PROCESS_TITLE)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)

    from gpulaunch.launcher.hang.helper import serve

    with contextlib.suppress(BrokenPipeError):
        serve(sys.stdin, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(run())
