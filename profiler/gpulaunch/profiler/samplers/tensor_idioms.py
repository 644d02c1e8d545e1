"""Finds in the source of a program operations on tensors for which others do far less.

`(a[:, None] - b[None]).pow(2).sum(-1)` makes a tensor of pairs x width, several times, and again in backward;
`torch.cdist(a, b)` or a product of matrices makes one of pairs. That is told where the differences are used for nothing
else. `torch.randperm(len(data))[:32]` draws a permutation of all samples for each batch.
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import Final

from gpulaunch.profiler.record.line_calls import PAIRS, PAIRS_FORWARD, PERMUTATION
from gpulaunch.profiler.samplers.loops import Function, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import nodes_of

_SQUARES: Final = frozenset({"pow", "square", "abs"})
_REDUCES: Final = frozenset({"sum", "mean", "norm", "vector_norm"})
_CHOOSES: Final = frozenset({"argmin", "argmax", "argsort", "no_grad", "inference_mode"})
_LAST: Final = (-1, 2, 3)
"""Numbers of the last dimension: of all pairs, or of those of each sample of a batch."""


def idioms_of(tree: ast.Module) -> dict[int, str]:
    """Return the lines of such operations, and what each is: one of `record.line_calls`.

    Args:
        tree: of a file.
    """
    found: dict[int, str] = {}
    for scope in (tree, *(node for node in nodes_of(tree) if isinstance(node, Function))):  # the innermost last
        for line, has_gradients in _distances_of_pairs(scope).items():
            found[line] = PAIRS if has_gradients else PAIRS_FORWARD
    for node in nodes_of(tree):
        if isinstance(node, ast.Subscript) and _is_part_of_permutation(node):
            found.update(dict.fromkeys(lines_of(node), PERMUTATION))
    return found


def _is_part_of_permutation(node: ast.Subscript) -> bool:
    """Whether it is the first elements of a permutation that is used for nothing else."""
    match node:
        case ast.Subscript(value=ast.Call() as call, slice=ast.Slice(lower=None, upper=ast.expr())):
            return last_name(call) == "randperm"
        case _:
            return False


def _distances_of_pairs(scope: ast.AST) -> dict[int, bool]:
    """The lines that make the differences of all pairs only for their distances, and whether backward goes through
    these: not where a function looks for the nearest."""
    found: dict[int, bool] = {}
    nodes = nodes_of(scope)
    has_gradients = _CHOOSES.isdisjoint(last_name(each) for each in nodes if isinstance(each, ast.Call))
    reads = Counter(each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load))
    names = {
        node.targets[0].id: node
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_of_pairs(node.value)
    }
    for node in nodes:
        if not isinstance(node, ast.Call) or (differences := _reduced(node)) is None:
            continue
        made_by: list[ast.stmt | ast.expr] = [node]
        if isinstance(differences, ast.Name) and differences.id in names and reads[differences.id] == 1:
            made_by.append(names[differences.id])
        elif not _is_of_pairs(differences):
            continue
        found.update((line, has_gradients) for each in made_by for line in lines_of(each))
    return found


def _reduced(call: ast.Call) -> ast.expr | None:
    """What a call reduces the squares of, over the last dimension: `x` of `x.pow(2).sum(-1)`; None: it does not."""
    if last_name(call) not in _REDUCES or not isinstance(call.func, ast.Attribute):
        return None
    on = call.func.value
    is_function = isinstance(on, ast.Name | ast.Attribute) and _last(on) in ("torch", "linalg")
    values = [*call.args] if is_function else [on, *call.args]
    dims = [*values[1:], *(each.value for each in call.keywords if each.arg in ("dim", "axis"))]
    if not values or not any(_number(each) in _LAST for each in dims):
        return None
    match values[0]:
        case ast.BinOp(left=squared, op=ast.Pow()):
            return squared
        case ast.Call(func=ast.Attribute(value=squared, attr=name)) if name in _SQUARES:
            return squared
        case _:
            return values[0] if last_name(call) in ("norm", "vector_norm") else None


def _is_of_pairs(node: ast.expr) -> bool:
    """Whether it is a difference of two tensors, each of which has a dimension more than it had, but another one."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
        return False
    left, right = _added(node.left), _added(node.right)
    return left is not None and right is not None and left != right


def _added(node: ast.expr) -> int | None:
    """The dimension that an expression adds to a tensor; None: none, or it is not known which."""
    match node:
        case ast.Call(func=ast.Attribute(attr="unsqueeze"), args=[dimension]):
            return _number(dimension)
        case ast.Subscript(slice=ast.Constant(value=None)):
            return 0
        case ast.Subscript(slice=ast.Tuple(elts=parts)):
            added = [at for at, part in enumerate(parts) if isinstance(part, ast.Constant) and part.value is None]
            return added[0] if len(added) == 1 else None
        case _:
            return None


def _number(node: ast.expr) -> int | None:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            return -number
        case _:
            return None


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr
