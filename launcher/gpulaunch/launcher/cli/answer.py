"""Print an answer to a question (help, plan, report) that may be read by half: `gpulaunch --help | head -1`."""

from __future__ import annotations

import os
import sys

from gpulaunch.launcher.job.options import UsageError


def answer(text: str) -> None:
    """Write `text` to stdout now. A reader that went away has had enough: that is no error.

    Names of files, functions and runs are in it, and may hold anything: what a terminal would obey, or its encoding
    does not have, is shown in another way.

    Raises:
        UsageError: stdout takes nothing, as on a full disk.
    """
    from gpulaunch.launcher.failure.redact import inert

    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        print(inert(text).encode(encoding, "replace").decode(encoding), end="", flush=True)
    except BrokenPipeError:
        drop()
    except OSError as err:
        drop()
        raise UsageError(f"cannot write to stdout: {err.strerror}") from None


def drop() -> None:
    """Let go of what stdout does not take: what is still buffered would fail once more when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
