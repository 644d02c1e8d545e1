"""Detects whether a tensor moved to the GPU was built on the CPU by the program, as in `torch.zeros(n).to(device)`.

It parses the program's source, once for each line that moves something. The alternative is to tap the functions that
build tensors; but `torch.set_default_device` and torch.compile compare these by identity and would not recognise a tap.

Detected are tensors that are built where they are moved, or are assigned to a name in the same function and moved under
that name. Anything from elsewhere, such as a batch, is data.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from gpulaunch.profiler.probe.source import call_under_way, parsed
from gpulaunch.profiler.probe.user_signals import raised_by_program

BUILDERS: Final = frozenset(
    ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros")
)
"""Functions of torch that build a tensor on the CPU, unless told otherwise."""

_Place = tuple[int, int]
"""Line, column (of the bytes, from 0)."""


def built_at(frame: FrameType, torch: Any) -> int:
    """The line that built, on the CPU, the tensor that the current call in `frame` moves; 0 if not built here."""
    try:
        tree, added = parsed(frame.f_code)
        call = call_under_way(frame.f_code, frame.f_lasti, tree, added)
        if call is None or not isinstance(call.func, ast.Attribute):
            return 0
        # The source of a copy: `x` in `x.to(...)` and in `y.copy_(x)`.
        moved = call.args[0] if call.func.attr == "copy_" else call.func.value
    except (OSError, SyntaxError, ValueError, IndexError, RecursionError) as error:
        if raised_by_program(error):
            raise
        return 0  # "<stdin>", a lambda within a line, a file that has changed
    # Not f_locals: Python keeps the values as long as the frame runs, and with them a step's tensors.
    names = frame.f_globals
    if isinstance(moved, ast.Name):
        given = _last_given(tree, moved.id, before=(call.lineno, call.col_offset))
        if given is None:
            return 0
        moved = given
    return moved.lineno + added if _builds(moved, names, torch) else 0


def _last_given(tree: ast.Module, name: str, before: _Place) -> ast.expr | None:
    """The last value assigned to the name, in source order; None if none, or not by a plain assignment."""
    given: tuple[_Place, ast.expr | None] = ((0, 0), None)
    for place, value in _given(tree, name):
        if given[0] < place < before:
            given = place, value
    return given[1]


def _given(tree: ast.Module, name: str) -> Iterator[tuple[_Place, ast.expr | None]]:
    """Every place that binds the name, with the value where that is evident."""
    values: dict[int, ast.expr | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            values.update({id(target): node.value for target in node.targets})
        elif isinstance(node, ast.AnnAssign):
            values[id(node.target)] = node.value
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            value = values.get(id(node))
            at = node if value is None else value
            yield (at.end_lineno or 0, at.end_col_offset or 0), value


def _builds(value: ast.expr, names: dict[str, Any], torch: Any) -> bool:
    """Whether a value is the result of a torch factory function, or of a method on it: `torch.zeros(3).long()`."""
    while isinstance(value, ast.Call):
        function = value.func
        if isinstance(function, ast.Name):
            found = names.get(function.id)
            return any(found is getattr(torch, builder) for builder in BUILDERS)
        if not isinstance(function, ast.Attribute):
            return False
        owner = function.value
        if isinstance(owner, ast.Name):
            return function.attr in BUILDERS and names.get(owner.id) is torch
        value = owner
    return False
