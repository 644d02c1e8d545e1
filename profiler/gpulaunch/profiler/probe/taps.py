"""Places taps in torch and removes them; used by every module of the probe that has taps.

A tap is a function that replaces one of torch's. A module places its own in `install(probe, torch, undo)`: it
raises `HookError` if torch does not look as expected, and appends to `undo` the function that removes the tap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

Undo = list[Callable[[], None]]
"""Functions that restore torch, to be called in reverse order."""


class HookError(Exception):
    """A tap's place in torch does not look as expected; the text says how."""


def put(owner: Any, name: str, tap: object, undo: Undo) -> None:
    """Set `owner.name`, a function of a module or a method of a class (its own or an inherited one), to `tap`.

    Its removal does not affect functions that others have put on top since.
    """
    inherited = name not in vars(owner)
    original = None if inherited else vars(owner)[name]
    setattr(owner, name, tap)

    def take_out() -> None:
        if vars(owner).get(name) is not tap:
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    undo.append(take_out)


def take_out(callbacks: list[Any], callback: object) -> None:
    """Take a callback out of a list of them, if it is still there."""
    if callback in callbacks:
        callbacks.remove(callback)


def exclude_from_compile(torch: Any, *taps: Any, ours: Iterable[object] = ()) -> None:
    """Have torch.compile run these taps as they are, and not compile them, when it meets them outside a graph.

    Only the taps: what they wrap calls user code (an autograd.Function, a dataset) that must still be compiled. `ours`
    are functions that taps call: those are kept out with all that they call.

    torch does so with its own files, by their path. The switch is in torch's C part, which is available without the
    1.4 s import of torch._dynamo. Where it is missing, taps are compiled away and report nothing in such programs.
    """
    try:
        eval_frame = torch._C._dynamo.eval_frame
        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        only_it = eval_frame._FrameExecStrategy(skip, default)
        and_below = eval_frame._FrameExecStrategy(skip, skip)
        for tap in taps:
            eval_frame.set_code_exec_strategy(tap.__code__, only_it)
        for function in ours:
            if isinstance(function, FunctionType):
                eval_frame.set_code_exec_strategy(function.__code__, and_below)
    except AttributeError:
        pass


def function_of(found: object, *, parameters: tuple[str, ...], variadic: bool) -> FunctionType:
    """Return `found` if it is a Python function with exactly these parameters.

    Raises:
        HookError: it is not.
    """
    if not isinstance(found, FunctionType):
        raise HookError(f"{found!r} is not a function")
    code = found.__code__
    has = code.co_varnames[: code.co_argcount]
    takes_rest = bool(code.co_flags & 0x04) and bool(code.co_flags & 0x08)  # CO_VARARGS, CO_VARKEYWORDS
    if has != parameters or code.co_kwonlyargcount or takes_rest != variadic:
        raise HookError(f"{found.__qualname__} takes {has}, not {parameters}")
    return found
