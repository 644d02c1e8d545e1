"""Finds in the source of a program losses that compare with a whole distribution for each target, made of its index.

    smoothed = torch.full_like(logp, smoothing / (classes - 2))
    smoothed.scatter_(1, target.unsqueeze(1), 1 - smoothing)
    return kl_div(logp, smoothed)

`cross_entropy(logits, target, label_smoothing=0.1)` makes no such matrix.
"""

from __future__ import annotations

import ast
from typing import Final

from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, lines_of, method_name, word_of
from gpulaunch.profiler.samplers.syntax import assigned_in, nodes_of, words_in

_KL: Final = frozenset({"KLDivLoss", "kl_div"})
_FILLS: Final = frozenset({"fill_", "full_like", "full", "zeros_like", "zeros", "index_fill_", "masked_fill_"})


def lines_of_dense_targets(tree: ast.Module) -> set[int]:
    """Return the lines that make such a matrix, and those of the loss.

    Args:
        tree: of a file.
    """
    found = set[int]()
    for of in nodes_of(tree):
        if not isinstance(of, ast.ClassDef | ast.FunctionDef) or _KL.isdisjoint(words_in(of)):
            continue
        for function in nodes_of(of):
            if isinstance(function, Function) and (written := _written(function)):
                criteria = _KL | {name for name in map(_criterion, nodes_of(of)) if name}
                for call in calls_in(function):
                    given = set[str]().union(*(words_in(each) for each in call.args))
                    makes = method_name(call) == "scatter_" or last_name(call) in _FILLS
                    if makes or (last_name(call) in criteria and written in given):
                        found.update(lines_of(call))
    return found


def _written(function: ast.AST) -> str:
    """The name of a matrix into which a number is written at the index of each target; empty: there is none.

    Where several are written, or one for each target, it is no smoothing: mixup, targets of several classes.
    """
    writes = [call for call in calls_in(function) if method_name(call) == "scatter_"]
    match writes:
        case [
            ast.Call(
                func=ast.Attribute(value=ast.Name(id=name)),
                args=[ast.Constant() | ast.UnaryOp(), ast.Call(func=ast.Attribute(attr="unsqueeze")), number],
            )
        ]:
            return name if _is_number(number, function) else ""
        case _:
            return ""


def _is_number(value: ast.expr, function: ast.AST) -> bool:
    """`0.9`, `1 - smoothing`, `self.confidence`, a name of one of these."""
    match value:
        case ast.Constant() | ast.BinOp(left=ast.Constant(), op=ast.Sub()) | ast.Attribute(value=ast.Name(id="self")):
            return True
        case ast.Name(id=name):
            values = [given for to, given in assigned_in(nodes_of(function)) if word_of(to) == name]
            return bool(values) and all(
                not isinstance(each, ast.Name) and _is_number(each, function) for each in values
            )
        case _:
            return False


def _criterion(node: ast.AST) -> str:
    """The name that is given a `KLDivLoss`; empty: none is."""
    match node:
        case ast.Assign(targets=[target], value=ast.Call() as call) if last_name(call) in _KL:
            return word_of(target)
        case _:
            return ""
