"""Prints output (help, plan, report) whose reader may close the pipe early: `gpulaunch --help | head -1`."""

from __future__ import annotations

import os
import sys

from gpulaunch.launcher.job.options import UsageError


def answer(text: str) -> None:
    """Write `text` to stdout now. A reader that has closed the pipe is no error.

    The text contains names of files, functions and runs, which may hold any character: terminal controls, and
    characters that the encoding lacks, are escaped.

    Raises:
        UsageError: stdout cannot be written, as on a full disk.
    """
    from gpulaunch.launcher.failure.redact import inert

    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        print(inert(text).encode(encoding, "replace").decode(encoding), end="", flush=True)
    except BrokenPipeError:
        discard_unwritten()
    except OSError as err:
        discard_unwritten()
        raise UsageError(f"cannot write to stdout: {err.strerror}") from None


def discard_unwritten() -> None:
    """Drop what stdout did not take: buffered data would fail once more at interpreter exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
