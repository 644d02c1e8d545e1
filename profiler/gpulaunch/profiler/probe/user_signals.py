"""Distinguishes an exception of our own code from one raised by a signal handler of the program.

Python runs handlers of signals between any two of its instructions, ours included. An exception of a handler (such as
a TimeoutError on SIGALRM) is meant to interrupt the program, and must reach it.
"""

from __future__ import annotations

import signal
from types import CodeType
from typing import Any


def raised_by_program(error: BaseException) -> bool:
    """Whether a handler of the program has raised it. For error handling only: it is slow."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    """The code of a handler: a function, a method, a partial of either, or an object that can be called."""
    handler = getattr(handler, "func", handler)
    handler = getattr(handler, "__func__", handler)
    call = getattr(type(handler), "__call__", None)  # noqa: B004 - not whether there is one, but which
    code = getattr(handler, "__code__", None) or getattr(call, "__code__", None)
    return code if isinstance(code, CodeType) else None
