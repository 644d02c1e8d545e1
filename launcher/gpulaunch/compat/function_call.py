"""Passes a function call from the caller of `elastic_launch` to the ranks, and the return values back.

This is the only place where gpulaunch pickles: a function, its arguments and its return value can be anything. The data
comes from the caller's own process and its own ranks, is stored in a directory that the caller made for this one call
(mode 0700, files 0600, removed when the call has ended), and is read by no other process. The engine between the two
ends passes on the directory's name and never opens a file in it.

A rank sees what a child of `multiprocessing` with "spawn" sees: the caller's sys.path, sys.argv and directory,
and functions of the caller's main file, which is imported as `__mp_main__`.

Runs inside ranks too: standard library only, nothing happens at import.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

_CALL = "call.pickle"
_VALUE = "value-{rank}.pickle"


def name_of(function: Callable[..., Any]) -> str:
    """The name of a callable for a message; some have no name."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def pack(call_dir: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Write the call, in the caller.

    Values are sent as copies, not as multiprocessing's shared handles: those can be opened only once, and each rank of
    each attempt needs the call again.

    Raises:
        TypeError: it cannot be sent; the message names the function and says what to do.
        RuntimeError: the caller's main file is being imported by a rank, and has no `if __name__ == "__main__"`.
    """
    from multiprocessing import spawn

    try:
        call = pickle.dumps((function, tuple(args)))
    except Exception as err:  # pickling the user's objects may raise anything
        raise TypeError(
            f"cannot send {name_of(function)} and its arguments to the ranks: {err}; "
            "it must be a function at the top level of a module, and its arguments must be picklable"
        ) from err
    preparation = spawn.get_preparation_data("MainProcess")
    if not _has_main(preparation) and _names_main(call):
        raise TypeError(
            f"cannot send {name_of(function)} to the ranks: it, or one of its arguments, is defined in an interactive "
            "session, which the ranks cannot import; move it to a file and import it from there"
        )
    # A plain key: multiprocessing refuses to pickle its own key type except for its own children.
    preparation["authkey"] = bytes(preparation["authkey"])
    _write(os.path.join(call_dir, _CALL), pickle.dumps(preparation) + call)


def load(call_dir: str, *, local_rank: int) -> Callable[[], Any]:
    """Read the call, in a rank: first the process takes over the caller's settings, as a spawned child would."""
    from multiprocessing import process, spawn

    this: Any = process.current_process()
    with open(os.path.join(call_dir, _CALL), "rb") as file:
        this._inheriting = True  # so that a main file without its guard, which would launch again here, gets an error
        try:
            spawn.prepare(pickle.load(file))  # noqa: S301 (the caller's own data; see above)
            function, args = pickle.load(file)  # noqa: S301
        finally:
            del this._inheriting
    return functools.partial(function, *(_fill(arg, local_rank) for arg in args))


def keep(call_dir: str, rank: int, value: Any) -> None:
    """Write the function's return value, in a rank, atomically."""
    try:
        data = pickle.dumps(value)
    except Exception as err:
        raise TypeError(f"cannot send the return value of rank {rank} back to the caller: {err}") from err
    path = os.path.join(call_dir, _VALUE.format(rank=rank))
    part = f"{path}.{os.getpid()}"
    _write(part, data)
    os.replace(part, path)  # an earlier attempt may have returned, too


def value(call_dir: str, rank: int) -> Any:
    """Return a rank's return value, in the caller; None if it ended well without returning, as by sys.exit()."""
    try:
        with open(os.path.join(call_dir, _VALUE.format(rank=rank)), "rb") as file:
            return pickle.load(file)  # noqa: S301 (from the caller's own rank; see above)
    except FileNotFoundError:
        return None


def _has_main(preparation: dict[str, Any]) -> bool:
    """Whether a rank can import the caller's `__main__`."""
    return "init_main_from_name" in preparation or os.path.isfile(preparation.get("init_main_from_path", ""))


def _names_main(call: bytes) -> bool:
    import pickletools  # only for callers without a main file

    return any(argument == "__main__" for _, argument, _ in pickletools.genops(call))


def _fill(arg: Any, local_rank: int) -> Any:
    """torchrun's macro also works in a function's arguments."""
    if not isinstance(arg, str) or "$" not in arg:
        return arg
    from string import Template

    return Template(arg).safe_substitute(local_rank=local_rank)


def _write(path: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
