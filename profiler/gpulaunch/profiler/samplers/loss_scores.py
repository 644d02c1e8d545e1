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
_CROSS_ENTROPY: Final = "cross_entropy"
_FORMS: Final = VIEWS | {"float"}


def in_cross_entropy(call: Call, frames: Sequence[Frame]) -> bool:
    """Whether the program's innermost line computes a cross-entropy, and no library for it.

    Args:
        call: see `sampled_calls.call_of`.
        frames: of the same sample.
    """
    return call.origin == "torch" and any(
        frame.name == _CROSS_ENTROPY and frame.file.endswith(_FUNCTIONAL) for frame in frames
    )


def lines_of_scores(tree: ast.Module) -> tuple[dict[int, int], set[int]]:
    """Return for the lines of calls that are given something with something else, such as targets, the line on which
    their function has computed that last; and which of those are given to `cross_entropy`.

    Args:
        tree: of a file.
    """
    found: dict[int, int] = {}
    of_cross_entropy: set[int] = set()
    for function in (node for node in nodes_of(tree) if isinstance(node, Function)):
        computed: dict[str, int] = {}
        for statement in statements_in(function.body):
            if not isinstance(statement, ast.Assign | ast.AugAssign | ast.Return | ast.Expr):
                continue
            for call in calls_in(statement):
                if call.args and len(call.args) + len(call.keywords) > 1 and root_of(call.args[0]) in computed:
                    line = computed[root_of(call.args[0])]
                    found.update(dict.fromkeys(lines_of(call), line))
                    of_cross_entropy |= {line} if last_name(call) == _CROSS_ENTROPY else set()
            for target, value in assigned_in([statement]):
                if isinstance(target, ast.Name):
                    is_form = isinstance(value, ast.Call) and method_name(value) in _FORMS
                    computed[target.id] = (is_form and computed.get(root_of(value))) or statement.lineno
    return found, of_cross_entropy
