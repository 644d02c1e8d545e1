"""Finds in the source of a program forward passes that a step makes again, only to measure its predictions.

`(model(x).argmax(1) == y)` computes anew what the loss has been computed from: the same function of the same
arguments. Where a program wants two outputs of one batch (with different dropout, or one without gradients as the
target of the other), none of them is only compared with the targets, so these are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, lines_of

_BLOCKS: Final = ("body", "orelse", "finalbody")
_COMPARED: Final = frozenset({"eq", "argmax", "topk", "accuracy", "accuracy_score", "roc_auc_score", "f1_score"})
"""What is done with predictions that no loss is computed from."""
_SWITCHES: Final = frozenset({"eval", "train"})
"""Methods after which the same call of a model gives something else."""

_Passes = dict[str, tuple[ast.Call, bool]]
"""The calls that a block has made so far by their text, and whether each was only to compare predictions."""


def passes_for_metrics(tree: ast.Module) -> set[int]:
    """Return the lines of calls that are only made to compare predictions, though the same call is made for the loss.

    Args:
        tree: of a file.
    """
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, Function))]
    again = (call for body in bodies for call in _again(body, {}, is_metric=False))
    return {line for call in again for line in lines_of(call)}


def _again(body: Sequence[ast.stmt], passes: _Passes, *, is_metric: bool) -> Iterator[ast.Call]:
    """The calls of a block that are only made to compare predictions, where the same one is made for the loss.

    Args:
        body: its statements.
        passes: calls before it; those of the block are added.
        is_metric: the block is without gradients, and compares predictions.
    """
    for statement in body:
        if isinstance(statement, Function | ast.ClassDef):
            continue
        blocks = [block for name in _BLOCKS if (block := getattr(statement, name, None))]
        compares = _compares(statement) and (not blocks or _is_without_gradients(statement))
        for block in blocks:
            always_runs = isinstance(statement, ast.With)
            yield from _again(block, passes if always_runs else dict(passes), is_metric=is_metric or compares)
        if not blocks:
            yield from _made_by(statement, passes, is_metric=is_metric or compares)
        _forget(passes, statement)


def _made_by(statement: ast.stmt, passes: _Passes, *, is_metric: bool) -> Iterator[ast.Call]:
    for call in calls_in(statement):
        if call.args and isinstance(call.func, ast.Name | ast.Attribute):
            before, was_metric = passes.setdefault(ast.unparse(call), (call, is_metric))
            if was_metric != is_metric:
                yield call if is_metric else before


def _forget(passes: _Passes, statement: ast.stmt) -> None:
    """Leave out the calls whose result may be another one after a statement."""
    nodes = list(ast.walk(statement))
    if any(isinstance(node, ast.Call) and last_name(node) in _SWITCHES for node in nodes):
        passes.clear()
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for text, (call, _) in list(passes.items()):
        if not stored.isdisjoint(_names(ast.walk(call))):
            del passes[text]


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def _is_without_gradients(statement: ast.stmt) -> bool:
    contexts = [each.context_expr for each in statement.items] if isinstance(statement, ast.With) else []
    return any(isinstance(each, ast.Call) and last_name(each) in ("no_grad", "inference_mode") for each in contexts)


def _compares(statement: ast.stmt) -> bool:
    """Whether a statement compares predictions with targets."""
    return any(last_name(call) in _COMPARED for call in calls_in(statement)) or any(
        isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq) for node in ast.walk(statement)
    )
