"""Finds the line on which a program computes the scores that it gives to a cross-entropy."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Final

from gpulaunch.profiler.samplers.function_bodies import statements_in
from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, lines_of, method_name
from gpulaunch.profiler.samplers.sampled_calls import Call
from gpulaunch.profiler.samplers.syntax import assigned_in, nodes_of, root_of
from gpulaunch.profiler.samplers.tensor_functions import VIEWS
from gpulaunch.profiler.stack import Frame

_FUNCTIONAL: Final = "/torch/nn/functional.py"
_FORMS: Final = VIEWS | {"float"}


def in_cross_entropy(call: Call, frames: Sequence[Frame]) -> bool:
    """Whether the program's innermost line computes a cross-entropy, and no library for it.

    Args:
        call: see `sampled_calls.call_of`.
        frames: of the same sample.
    """
    return call.origin == "torch" and any(
        frame.name == "cross_entropy" and frame.file.endswith(_FUNCTIONAL) for frame in frames
    )


def lines_of_scores(tree: ast.Module, of: str = "") -> dict[int, int]:
    """Return for the lines of calls that are given something with something else, such as targets, the line on which
    their function has computed that last.

    Args:
        tree: of a file.
        of: the name of what is called; empty: anything.
    """
    found: dict[int, int] = {}
    for function in (node for node in nodes_of(tree) if isinstance(node, Function)):
        computed: dict[str, int] = {}
        for statement in statements_in(function.body):
            if not isinstance(statement, ast.Assign | ast.AugAssign | ast.Return | ast.Expr):
                continue
            for call in calls_in(statement):
                if of not in ("", last_name(call)):
                    continue
                if call.args and len(call.args) + len(call.keywords) > 1 and root_of(call.args[0]) in computed:
                    found.update(dict.fromkeys(lines_of(call), computed[root_of(call.args[0])]))
            for target, value in assigned_in([statement]):
                if isinstance(target, ast.Name):
                    is_form = isinstance(value, ast.Call) and method_name(value) in _FORMS
                    line = computed.get(root_of(value)) if is_form else None
                    computed[target.id] = line or statement.lineno
    return found
