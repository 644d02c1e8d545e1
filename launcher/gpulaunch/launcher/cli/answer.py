"""Print an answer to a question (help, plan, report) that may be read by half: `gpulaunch --help | head -1`."""

from __future__ import annotations

import os
import sys


def answer(text: str) -> None:
    """Write `text` to stdout now. A reader that went away has had enough: that is no error."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        # What is still buffered would fail once more when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
