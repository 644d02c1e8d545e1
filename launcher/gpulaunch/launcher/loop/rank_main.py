"""Inside a rank: becomes the user's program, as `python -u train.py` would have made it, and ends it safely.

Used in two ways that must look the same to the program: called by a child of the fork server, and executed as
`python -u rank_main.py <json>` when ranks are spawned. Standard library only; nothing happens at import.

How a rank ends: non-daemon threads are joined, atexit functions run, files are flushed, then `os._exit`. The
interpreter is not torn down: in torch 2.13 `~ProcessGroupGloo` joins a thread that waits for the GIL, so a rank that
clears its module globals can hang there for ever or abort ("terminate called without an active exception").
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn


def run(program: dict[str, Any]) -> NoReturn:
    """Run one program as `__main__` and end the process.

    `program`: kind ("script", "module", "run_path" or "function"), target, args (list), python, call_dir (of a
    function), error_file ("" for none).
    """
    _arm(program["error_file"])
    code = 1
    try:
        _run_as_main(program)
        code = 0
    except SystemExit as stop:
        code = _code_of(stop, program["error_file"])
    except KeyboardInterrupt as stop:
        _tell(stop, program["error_file"])
        _flush_std()
        _die_of_sigint()
    except BaseException as problem:  # the end of the user's program: its traceback is shown as Python would show it
        _tell(problem, program["error_file"])
    leave(code)


def leave(code: int) -> NoReturn:
    """What Py_Finalize does for a program's data, then `os._exit(code)`; see the module's docstring."""
    import atexit
    import threading

    with contextlib.suppress(
        BaseException
    ):  # as at interpreter exit: a failing thread or hook does not change the code
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  # what Py_Finalize calls
    with contextlib.suppress(BaseException):
        _flush_open_files()
    _flush_std()
    os._exit(code & 0xFF)


def _arm(error_file: str) -> None:
    """Prepare last words and the probe; a rank runs without them if they fail."""
    with contextlib.suppress(Exception):
        from gpulaunch.launcher.failure import inside

        if error_file:
            inside.arm(error_file)
    if "torch" in sys.modules:
        # torch was imported before the fork, when this was nobody's rank: its entry point had nothing to arm.
        with contextlib.suppress(Exception):
            from gpulaunch.profiler.probe import inject

            inject.arm()


def _run_as_main(program: dict[str, Any]) -> None:
    import runpy

    kind, target, args = program["kind"], program["target"], list(program["args"])
    if kind == "function":
        from gpulaunch.compat import _callable

        rank = int(os.environ["RANK"])
        _fresh_main()
        call = _callable.load(program["call_dir"], local_rank=int(args[0]))
        # Called from here, so that the traceback of what the function raises begins with the function.
        _callable.keep(program["call_dir"], rank, call())
        return
    sys.argv = [target, *args]
    if kind == "run_path":
        # torchrun: "run the training script with runpy.run_path in the same interpreter".
        runpy.run_path(target, run_name="__main__")
        return
    main = _fresh_main()
    if kind == "module":
        sys.orig_argv = [program["python"], "-u", "-m", target, *args]
        _put_first_on_path(os.getcwd())
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        return
    sys.orig_argv = [program["python"], "-u", target, *args]
    if os.path.isdir(target) or _is_zip(target):
        _put_first_on_path(os.path.abspath(target))
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    # As CPython does for `python script.py`: the script's real directory first, an absolute __file__.
    _put_first_on_path(os.path.dirname(os.path.realpath(target)))
    path = os.path.abspath(target)
    code = _compile(path, target)
    from importlib.machinery import SourceFileLoader

    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    exec(code, main.__dict__)  # noqa: S102 (this is the user's own program)


def _fresh_main() -> ModuleType:
    """A new `__main__`, as at interpreter start: multiprocessing, pickling and tracebacks look there."""
    import builtins

    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    return main


def _put_first_on_path(path: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, path)


def _is_zip(path: str) -> bool:
    if path.endswith(".py"):
        return False
    import zipfile

    return zipfile.is_zipfile(path)


def _compile(path: str, shown: str) -> CodeType:
    try:
        with open(path, "rb") as script:
            source = script.read()
    except OSError as err:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {err.errno}] {err.strerror}\n")
        raise SystemExit(2) from None
    if source.startswith(_pyc_magic()) or shown.endswith(".pyc"):
        import marshal

        code: CodeType = marshal.loads(source[16:])  # noqa: S302 (`python x.pyc` does the same)
        return code
    return compile(source, path, "exec", dont_inherit=True)


def _pyc_magic() -> bytes:
    from importlib.util import MAGIC_NUMBER

    return MAGIC_NUMBER


def _code_of(stop: SystemExit, error_file: str) -> int:
    """The exit status of a SystemExit, as Python computes it; a message goes to stderr."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        code = stop.code
    else:
        _flush_std()
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{stop.code}\n")
        code = 1
    if code:
        with contextlib.suppress(Exception):
            from gpulaunch.launcher.failure import inside

            inside.last_words(stop, error_file)
    return code


def _tell(problem: BaseException, error_file: str) -> None:
    """Write the last words, then show the traceback through the user's own excepthook, without our frames."""
    problem.__traceback__ = _without_ours(problem.__traceback__)
    with contextlib.suppress(Exception):
        from gpulaunch.launcher.failure import inside

        if error_file:
            inside.last_words(problem, error_file)
    try:
        sys.excepthook(type(problem), problem, problem.__traceback__)
    except BaseException:
        # A broken user hook: Python shows the original with its own; so do we.
        sys.__excepthook__(type(problem), problem, problem.__traceback__)


_LOADERS = ("/gpulaunch/compat/_callable.py", "/multiprocessing/spawn.py")


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Cut the leading frames of this file and of those that load the program, which the user did not write."""
    cut = trace
    while cut is not None:
        name = cut.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name and not name.endswith(_LOADERS):
            return cut
        cut = cut.tb_next
    # A SyntaxError of the script itself has no frame of the user's; it needs none.
    return None


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


def _flush_std() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _die_of_sigint() -> NoReturn:
    """End as Python does after an unhandled KeyboardInterrupt: by the signal itself, so that callers can tell."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(130)


def main() -> NoReturn:
    """`python -u rank_main.py <json>`: a spawned rank, in the environment and session that the agent gave it."""
    import json

    program = json.loads(sys.argv[1])
    if not sys.flags.safe_path:
        del sys.path[0]  # this file's directory, put there by Python
    run(program)


if __name__ == "__main__":
    main()
