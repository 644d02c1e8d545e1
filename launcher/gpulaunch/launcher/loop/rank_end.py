"""Ends a rank as a Python program ends, but without tearing the interpreter down. Standard library only.

Non-daemon threads are joined, atexit functions run, the program's objects are freed, its open files are flushed, then
`os._exit`. The interpreter is not torn down, and what torch's C++ made for communication is never freed: in torch 2.13
`~ProcessGroupGloo` joins a thread that waits for the GIL, so a rank that frees it can hang forever or abort
("terminate called without an active exception").
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any, NoReturn

_NEVER_FREED = "torch._C._distributed"  # process groups, reducers, stores, RPC agents
_NOT_FINALIZED = frozenset({"torch", "threading", "gpulaunch"})  # in use until the end
_USED_BY_DESTRUCTORS = (ModuleType, FunctionType, BuiltinFunctionType, type, str, bytes, int, float)
_INSTALLED = (os.path.dirname(os.__file__) + os.sep, "/site-packages/", "/dist-packages/")

_kept: list[Any] = []
_born: list[Any] = []
"""Made when the rank begins: if the collector does not know it at the end, the program called gc.freeze()."""


def begin() -> None:
    """A rank starts; what the collector has frozen until now was imported by the fork server."""
    global _born
    _born = []


def leave(code: int) -> NoReturn:
    """End the process with `code`, after the cleanup."""
    _finish()
    os._exit(code & 0xFF)


def leave_by_sigint() -> NoReturn:
    """End as Python does after an unhandled KeyboardInterrupt: clean up, then die of the signal for callers to see."""
    _finish()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(130)


def flush_std() -> None:
    """Flush stdout and stderr, whatever objects they are now."""
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
    threading.excepthook = _nothing  # CPython would stop daemon threads from here on
    with contextlib.suppress(BaseException):
        _free_the_programs_objects()
    with contextlib.suppress(BaseException):
        _flush_open_files()
    flush_std()


def _nothing(_: object) -> None:
    """Ignore errors of daemon threads that miss freed objects."""


def _free_the_programs_objects() -> None:
    """Free the program's objects: destructors complete archives, databases, videos and temporary files.

    As CPython's finalize_modules() (Python/pylifecycle.c), modules are released, then their globals are cleared: first
    what destructors free, the latest first, as it may need what was made before it; then what destructors use (modules,
    functions, classes, names, loggers). Packages stay as they are.
    """
    import logging

    if not any(thing is _born for thing in gc.get_objects()):
        gc.unfreeze()
    _keep_what_is_never_freed()
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    running = _globals_of_threads()
    programs = [
        vars(sys.modules.pop(name))
        for name, module in list(sys.modules.items())
        if _is_programs(name, module) and id(vars(module)) not in running
    ]
    gc.collect()
    for used in ((*_USED_BY_DESTRUCTORS, logging.Logger), ()):
        for names in programs:
            for name in reversed([*names]):
                if name != "__builtins__" and not issubclass(type(names.get(name)), used):
                    names[name] = None
        gc.collect()
    _finalize_what_is_left()


def _keep_what_is_never_freed() -> None:
    """Collect the referrers: the collector does not know the objects themselves."""
    kinds: dict[type, bool] = {}
    holders = gc.get_objects()
    for first in range(0, len(holders), 10_000):
        found = gc.get_referents(*holders[first : first + 10_000])
        for thing in found:
            kind = type(thing)
            if kind not in kinds:
                kinds[kind] = any(str(base.__module__).startswith(_NEVER_FREED) for base in kind.__mro__)
            if kinds[kind]:
                _kept.append(thing)
            elif kind in (dict, tuple) and not gc.is_tracked(thing):  # untracked as long as its content is untracked
                found += gc.get_referents(thing)


def _globals_of_threads() -> set[int]:
    """Globals of the code that other threads run: CPython would stop these, but here they run until the end."""
    found: set[int] = set()
    for frame in sys._current_frames().values():  # pyright: ignore[reportPrivateUsage]
        at: FrameType | None = frame
        while at is not None:
            found.add(id(at.f_globals))
            at = at.f_back
    return found


def _is_programs(name: str, module: object) -> bool:
    if type(module) is not ModuleType or name.partition(".")[0] in _NOT_FINALIZED:  # torch may be one built in place
        return False
    file = getattr(module, "__file__", None)
    return name == "__main__" or (isinstance(file, str) and not any(part in file for part in _INSTALLED))


def _finalize_what_is_left() -> None:
    """What package modules hold, or what torch's kept C++ objects refer to."""
    destructors: dict[type, Any] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in destructors:
            ours = str(kind.__module__).partition(".")[0] not in _NOT_FINALIZED
            destructor = getattr(kind, "__del__", None) if ours else None
            destructors[kind] = destructor if isinstance(destructor, FunctionType) else None
        if destructors[kind] is not None and not gc.is_finalized(thing):
            with contextlib.suppress(BaseException):
                destructors[kind](thing)


def _flush_open_files() -> None:
    """Finish the files that the program left open as their destructors would.

    Buffers of io's own writers are flushed; other writable io objects (gzip, bz2, user classes) are closed, because
    only their close() writes the end of the file.
    """
    import io

    std = {id(sys.stdout), id(sys.stderr), id(sys.stdin)}
    text: list[Any] = []
    other: list[Any] = []
    buffers: list[Any] = []
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance(): a proxy may run user code in its __class__
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
