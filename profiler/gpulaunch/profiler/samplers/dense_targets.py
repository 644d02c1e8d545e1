"""Finds in the source of a program losses that compare with a whole distribution for each target, made of its index.

    smoothed = torch.full_like(logp, smoothing / (classes - 2))
    smoothed.scatter_(1, target.unsqueeze(1), 1 - smoothing)
    return kl_div(logp, smoothed)

`cross_entropy(logits, target, label_smoothing=0.1)` makes no such matrix.
"""

from __future__ import annotations

import ast
from typing import Final

from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, lines_of, method_name, owner_of, word_of
from gpulaunch.profiler.samplers.syntax import assigned_in, nodes_of, root_of, words_in

_KL: Final = frozenset({"KLDivLoss", "kl_div"})
_CHANGES: Final = frozenset({"fill_", "scatter_", "index_fill_", "masked_fill_", "detach", "clone", "requires_grad_"})
"""Methods of such a matrix while it is made; `fill_` first, if it was not made by `full_like`."""


def lines_of_dense_targets(tree: ast.Module) -> set[int]:
    """Return the lines that make such a matrix, and those of the loss.

    Args:
        tree: of a file.
    """
    found = set[int]()
    for of in nodes_of(tree):
        if isinstance(of, ast.ClassDef | ast.FunctionDef) and not _KL.isdisjoint(words_in(of)):
            criteria = _KL | {name for name in map(_criterion, nodes_of(of)) if name}
            for function in nodes_of(of):
                if isinstance(function, Function) and (name := _written(function)):
                    losses = [
                        call
                        for call in calls_in(function)
                        if last_name(call) in criteria and any(root_of(each) == name for each in call.args[1:2])
                    ]
                    if losses:
                        makes = (call for call in calls_in(function) if owner_of(call) == name)
                        found.update(line for call in (*makes, *losses) for line in lines_of(call))
    return found


def _written(function: ast.AST) -> str:
    """The name of a matrix of one number into which another is written at the index of each target; empty: there is
    none.

    Where several are written, or one for each target, it is no smoothing: mixup, targets of several classes.
    """
    match [call for call in calls_in(function) if method_name(call) == "scatter_"]:
        case [
            ast.Call(
                func=ast.Attribute(value=ast.Name(id=name)),
                args=[ast.Constant() | ast.UnaryOp(), ast.Call(func=ast.Attribute(attr="unsqueeze")), number],
            )
        ]:
            methods = {method_name(call) for call in calls_in(function) if owner_of(call) == name}
            made = [value for to, value in assigned_in(nodes_of(function)) if ast.unparse(to) == name]
            if len(made) != 1 or not methods <= _CHANGES or not _is_number(number, function):
                return ""
            is_full = isinstance(made[0], ast.Call) and last_name(made[0]) in ("full_like", "full")
            return name if is_full or "fill_" in methods else ""
        case _:
            return ""


def _is_number(value: ast.expr, function: ast.AST) -> bool:
    """`0.9`, `1 - smoothing`, `self.confidence`, a name of one of these; not the 1 of a mask."""
    match value:
        case ast.Constant(value=float(number)):
            return 0 < number < 1
        case ast.BinOp(left=ast.Constant(value=1), op=ast.Sub()) | ast.Attribute(value=ast.Name(id="self")):
            return True
        case ast.Name(id=name):
            values = [given for to, given in assigned_in(nodes_of(function)) if word_of(to) == name]
            numbers = [each for each in values if not isinstance(each, ast.Name) and _is_number(each, function)]
            return numbers == values != []
        case _:
            return False


def _criterion(node: ast.AST) -> str:
    """The name that is given a `KLDivLoss`; empty: none is."""
    match node:
        case ast.Assign(targets=[target], value=ast.Call() as call) if last_name(call) in _KL:
            return word_of(target)
        case _:
            return ""
