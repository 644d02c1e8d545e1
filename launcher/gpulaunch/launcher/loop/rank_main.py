"""Inside a rank: runs the user's program as `python -u train.py` would, and ends it safely.

Used in two ways that must look the same to the program: called by a child of the fork server, and executed as
`python -u rank_main.py <json>` when ranks are spawned. Standard library only; nothing happens at import.

The end is in `rank_end.py`.
"""

from __future__ import annotations

import sys

_AT_START = frozenset(sys.modules)  # what the interpreter itself has loaded, before anything below

import contextlib
import os
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from gpulaunch.launcher.loop import rank_end
else:
    try:
        from gpulaunch.launcher.loop import rank_end
    except ImportError:  # executed by another interpreter (PYTHON_EXEC), which lacks this package
        sys.path.insert(0, os.path.dirname(__file__))
        import rank_end

        del sys.path[0]


# A user's module with one of these names is intended, and ranks that need it are spawned (job.imports).
_KEPT = frozenset({"__main__", "gpulaunch"})


def run(program: dict[str, Any], at_start: frozenset[str]) -> NoReturn:
    """Run one program as `__main__` and end the process.

    `program`: kind ("script", "module", "run_path" or "function"), target, args (list), python, call_dir (of a
    function), error_file ("" for none). `at_start`: the modules that Python itself had loaded when it started.
    """
    rank_end.begin()
    _arm(program["error_file"])
    code = 1
    try:
        _run_as_main(program, at_start)
        code = 0
    except SystemExit as stop:
        code = _code_of(stop, program["error_file"])
    except KeyboardInterrupt as stop:
        _tell(stop, program["error_file"])
        rank_end.leave_by_sigint()
    except BaseException as problem:  # the end of the user's program: show its traceback as Python would
        code = _tell(problem, program["error_file"])
    rank_end.leave(code)


def _arm(error_file: str) -> None:
    """Prepare `write_error_file`; a rank runs without it if that fails."""
    with contextlib.suppress(Exception):
        from gpulaunch.launcher.failure import inside

        if error_file:
            inside.arm(error_file)


def arm_probe() -> None:
    """For the preloaded torch: when it was imported this was no rank, so its entry point had nothing to arm."""
    with contextlib.suppress(Exception):
        from gpulaunch.profiler.probe import inject

        inject.arm()


def _run_as_main(program: dict[str, Any], at_start: frozenset[str]) -> None:
    import runpy

    kind, target, args = program["kind"], program["target"], list(program["args"])
    if kind == "function":
        from gpulaunch.compat import function_call

        rank = int(os.environ["RANK"])
        _fresh_main()
        call = function_call.load(program["call_dir"], local_rank=int(args[0]))
        # Called from here, so that the traceback of what the function raises begins with the function.
        function_call.keep(program["call_dir"], rank, call())
        return
    sys.argv = [target, *args]
    if kind == "run_path":
        # torchrun: "run the training script with runpy.run_path in the same interpreter".
        runpy.run_path(target, run_name="__main__")
        return
    main = _fresh_main()
    if kind == "module":
        sys.orig_argv = [program["python"], "-u", "-m", target, *args]
        _put_first_on_path(os.getcwd(), at_start)
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        return
    sys.orig_argv = [program["python"], "-u", target, *args]
    if os.path.isdir(target) or _is_zip(target):
        _put_first_on_path(os.path.abspath(target), at_start)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    # As CPython does for `python script.py`: the script's real directory first, an absolute __file__.
    _put_first_on_path(os.path.dirname(os.path.realpath(target)), at_start)
    path = os.path.abspath(target)
    code = _compile(path, target)
    from importlib.machinery import SourceFileLoader

    main.__file__ = path
    main.__cached__ = None  # type: ignore[attr-defined]
    main.__loader__ = SourceFileLoader("__main__", path)
    exec(code, main.__dict__)  # noqa: S102 (this is the user's own program)


def _fresh_main() -> ModuleType:
    """A new `__main__`, as at interpreter start: multiprocessing, pickling and tracebacks look there."""
    import builtins

    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:
        # multiprocessing, imported by torch, made this an alias of the then main module; its children pickle what they
        # send back under that name.
        sys.modules["__mp_main__"] = main
    return main


def _put_first_on_path(path: str, at_start: frozenset[str]) -> None:
    """As Python does; modules that the program would have found there first must take precedence over torch's.

    A user module next to the script may have the name of one that the fork server has loaded (profile.py,
    statistics.py): the loaded one is removed, so that the program's import finds its own. torch keeps the one it has.
    """
    if sys.flags.safe_path:
        return
    sys.path.insert(0, path)
    with contextlib.suppress(OSError):
        beside = {entry.partition(".")[0] for entry in os.listdir(path) if _is_module(path, entry)}
        for name in beside & (sys.modules.keys() - at_start - _KEPT):
            for loaded in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                del sys.modules[loaded]


def _is_module(directory: str, entry: str) -> bool:
    """Whether an entry of a directory can be imported by its name."""
    if entry.endswith((".py", ".so", ".pyc")):
        return True
    return "." not in entry and os.path.isfile(os.path.join(directory, entry, "__init__.py"))


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
        rank_end.flush_std()
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{stop.code}\n")
        code = 1
    if code:
        with contextlib.suppress(Exception):
            from gpulaunch.launcher.failure import inside

            inside.write_error_file(stop, error_file)
    return code


def _tell(problem: BaseException, error_file: str) -> int:
    """Write the error file, show the traceback through the user's excepthook, and return the exit code."""
    problem.__traceback__ = _without_ours(problem.__traceback__)
    with contextlib.suppress(Exception):
        from gpulaunch.launcher.failure import inside

        if error_file:
            inside.write_error_file(problem, error_file)
    try:
        sys.excepthook(type(problem), problem, problem.__traceback__)
    except SystemExit as stop:  # the hook decides the code, as in Python
        return _code_of(stop, error_file)
    except BaseException:
        # A broken user hook: Python then shows the original with its own hook; so do we.
        sys.__excepthook__(type(problem), problem, problem.__traceback__)
    return 1


_LOADERS = ("/gpulaunch/compat/function_call.py", "/multiprocessing/spawn.py")


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Cut the leading frames of this file and of those that load the program, which are not the user's."""
    cut = trace
    while cut is not None:
        name = cut.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name and not name.endswith(_LOADERS):
            return cut
        cut = cut.tb_next
    # A SyntaxError of the script itself has no user frame and needs none.
    return None


def main() -> NoReturn:
    """`python -u rank_main.py <json>`: a spawned rank, in the environment and session that the agent gave it."""
    import json

    program = json.loads(sys.argv[1])
    if not sys.flags.safe_path:
        del sys.path[0]  # this file's directory, put there by Python
    run(program, _AT_START)


if __name__ == "__main__":
    main()
