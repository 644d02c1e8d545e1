"""Finds the statistics of an averaged model that are computed again and again, and used once.

    while train_epoch():
        averaged.update_parameters(model)
        update_bn(loader, averaged)

`torch.optim.swa_utils.update_bn` runs the model on all of a loader. Whoever evaluates or saves the averaged model in
the loop needs that; else it belongs after the loop.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, lines_of, word_of
from gpulaunch.profiler.samplers.syntax import assigned_in, nodes_of
from gpulaunch.profiler.stack import Frame

_UPDATES: Final = "update_bn"
_SWA: Final = "/torch/optim/swa_utils.py"


def caller_of_update(frames: Sequence[Frame]) -> Frame | None:
    """Return the frame that has called `update_bn`; None: none has.

    Args:
        frames: the deepest first.
    """
    calls = ((frame, caller) for frame, caller in pairwise(frames) if frame.file.endswith(_SWA))
    return next((caller for frame, caller in calls if frame.name == _UPDATES), None)


def lines_of_updates(tree: ast.Module) -> set[int]:
    """Return the lines that call `update_bn` in a loop, for a model that is used for nothing in it or elsewhere.

    Args:
        tree: of a file.
    """
    found = set[int]()
    for function in [tree, *(node for node in nodes_of(tree) if isinstance(node, Function))]:
        for loop in nodes_of(function):
            if isinstance(loop, ast.For | ast.While):
                for call, model in _updates_in(loop):
                    scope = tree if isinstance(model, ast.Attribute) else function
                    if not _is_used(word_of(model), scope, function, loop.end_lineno or loop.lineno):
                        found.update(lines_of(call))
    return found


def _updates_in(part: ast.AST) -> Iterator[tuple[ast.Call, ast.expr]]:
    for call in calls_in(part):
        if last_name(call) == _UPDATES and len(call.args) > 1 and word_of(call.args[1]):
            yield call, call.args[1]


def _is_used(model: str, scope: ast.AST, function: ast.AST, loop_end: int) -> bool:
    """Whether a model is used for more than its average, other than after the loop.

    Args:
        model: its name, or that of an attribute.
        scope: where it is known.
        function: which has the loop.
        loop_end: its last line.
    """
    averaged = {id(of) for _, of in _updates_in(scope)}
    averaged |= {
        id(call.func.value)
        for call in calls_in(scope)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "update_parameters"
    }
    averaged |= {id(target) for target, _ in assigned_in(nodes_of(scope))}
    averaged |= {id(node) for node in nodes_of(function) if isinstance(node, ast.expr) and node.lineno > loop_end}
    return any(
        isinstance(node, ast.Name | ast.Attribute | ast.Constant) and word_of(node) == model
        for node in nodes_of(scope)
        if id(node) not in averaged
    )
