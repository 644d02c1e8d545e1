"""Finds the statistics of an averaged model that are computed again and again, and used once.

    while train_epoch():
        averaged.update_parameters(model)
        update_bn(loader, averaged)

`torch.optim.swa_utils.update_bn` runs the model on all of a loader. A loop that evaluates or
saves the averaged model needs that; else it belongs after the loop.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence, Set
from itertools import pairwise
from typing import Final

from gpulaunch.profiler.samplers.loops import calls_in, last_name, lines_of, word_of
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
    """Return the lines that call `update_bn` in every turn of a loop, for a model that nothing else in the file uses
    before the loop has ended.

    Args:
        tree: of a file.
    """
    found = set[int]()
    bases = {id(each) for of in nodes_of(tree) if isinstance(of, ast.ClassDef) and of.bases for each in nodes_of(of)}
    for function in nodes_of(tree):
        if isinstance(function, ast.FunctionDef) and id(function) not in bases:  # a base class may use it elsewhere
            for loop in function.body:
                if isinstance(loop, ast.For | ast.While):
                    found.update(_updates_in(loop, function, tree))
    return found


def _updates_in(loop: ast.For | ast.While, function: ast.FunctionDef, tree: ast.Module) -> set[int]:
    """The lines of such calls among the statements that a loop of a function makes in every turn."""
    found = set[int]()
    if not any(isinstance(node, ast.Break | ast.Return) for node in nodes_of(loop)):
        for statement in _every_turn(loop.body):
            match statement:
                case ast.Expr(
                    value=ast.Call(args=[_, ast.Name() | ast.Attribute(value=ast.Name(id="self")) as model, *_]) as call
                ) if last_name(call) == _UPDATES:
                    after = {id(node) for each in function.body if each.lineno > loop.lineno for node in nodes_of(each)}
                    if not _is_used(word_of(model), tree, after):
                        found.update(lines_of(call))
                case _:
                    pass
    return found


def _every_turn(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a loop that all turns make, or none does: those under `if USE_SWA:` as well."""
    for statement in body:
        if isinstance(statement, ast.If) and _is_setting(statement.test):
            yield from _every_turn(statement.body)
        else:
            yield statement


def _is_setting(test: ast.expr) -> bool:
    """`USE_SWA`, `not PLAIN`"""
    named = test.operand if isinstance(test, ast.UnaryOp) else test
    return isinstance(named, ast.Name) and named.id.isupper()


def _is_used(model: str, tree: ast.Module, after: Set[int]) -> bool:
    """Whether a model is used for more than its average.

    Args:
        model: its name, or that of an attribute.
        tree: of the file: all that has this name counts.
        after: the nodes of what its function does after the loop, which do not.
    """
    averages = {id(target) for target, _ in assigned_in(nodes_of(tree))} | after
    for call in calls_in(tree):
        if last_name(call) == _UPDATES:
            averages |= {id(each) for each in call.args[1:2]}
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "update_parameters":
            averages.add(id(call.func.value))
    return any(
        isinstance(node, ast.Name | ast.Attribute | ast.Constant) and word_of(node) == model
        for node in nodes_of(tree)
        if id(node) not in averages
    )
