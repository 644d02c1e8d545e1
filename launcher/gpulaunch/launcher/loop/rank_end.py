"""How a rank ends: as a program under Python does, but without tearing the interpreter down. Standard library only.

Non-daemon threads are joined, atexit functions run, what the program left open gets the end that its destructors would
have given it, then `os._exit`. The interpreter is not torn down: in torch 2.13 `~ProcessGroupGloo` joins a thread that
waits for the GIL, so a rank that clears its module globals can hang there for ever or abort ("terminate called without
an active exception").
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any, NoReturn

# Whose destructors are the point of not tearing down, and those that only guard against being forgotten.
_NOT_FINALIZED = frozenset({"torch", "builtins", "threading", "gpulaunch"})


def leave(code: int) -> NoReturn:
    """End the process well with `code`."""
    _finish()
    os._exit(code & 0xFF)


def leave_by_sigint() -> NoReturn:
    """End as Python does after an unhandled KeyboardInterrupt: finish, then die of the signal, so callers can tell."""
    _finish()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(130)


def flush_std() -> None:
    """Flush stdout and stderr, whatever they are by now."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _finish() -> None:
    """What Py_Finalize does for a program's data. A failing thread or hook does not change the exit code, as there."""
    import atexit
    import threading

    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  # what Py_Finalize calls
    with contextlib.suppress(BaseException):
        _finalize_globals()
    with contextlib.suppress(BaseException):
        _flush_open_files()
    flush_std()


def _finalize_globals() -> None:
    """Give the objects in the program's own globals the destructor they would have met: archives, temporary files."""
    main = sys.modules.get("__main__")
    for thing in list(vars(main).values()) if main is not None else []:
        kind = type(thing)
        closer = getattr(thing, "_closer", None) if kind.__module__ == "tempfile" else None  # NamedTemporaryFile's
        for one in (thing, closer):
            destructor = getattr(type(one), "__del__", None)
            if destructor is not None and type(one).__module__.partition(".")[0] not in _NOT_FINALIZED:
                with contextlib.suppress(BaseException):
                    destructor(one)


def _flush_open_files() -> None:
    """Give the files that the program left open the end that their destructors would have given them.

    Buffers of io's own writers are flushed; other writable io objects (gzip, bz2, user classes) are closed, because
    only their close() writes the end of the file.
    """
    import gc
    import io

    std = {id(sys.stdout), id(sys.stderr), id(sys.stdin)}
    text: list[Any] = []
    other: list[Any] = []
    buffers: list[Any] = []
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance(): a proxy may run user code when asked for its __class__
        if not issubclass(kind, io.IOBase) or id(thing) in std:
            continue
        if issubclass(kind, io.TextIOWrapper):
            text.append(thing)
        elif issubclass(kind, (io.BufferedWriter, io.BufferedRandom)):
            buffers.append(thing)
        elif kind.__module__ not in ("io", "_io", "socket"):
            other.append(thing)
    # From the top layer down: text into a gzip file, the gzip file into its buffer, the buffer into the file.
    for things, end in ((text, "flush"), (other, "close"), (buffers, "flush")):
        for thing in things:
            with contextlib.suppress(Exception):
                if not thing.closed and thing.writable():
                    getattr(thing, end)()
