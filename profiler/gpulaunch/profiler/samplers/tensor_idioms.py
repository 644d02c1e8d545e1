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
from gpulaunch.profiler.samplers.loops import Function, last_name, lines_of, word_of
from gpulaunch.profiler.samplers.syntax import nodes_of, words_in

_SQUARES: Final = frozenset({"pow", "square"})
_NORMS: Final = frozenset({"norm", "vector_norm"})
_CHOOSES: Final = frozenset(
    {"argmin", "argmax", "argsort", "topk", "sort", "indices", "detach", "no_grad", "inference_mode"}
)
"""Words of a function by which backward may not go through all distances."""
_LAST: Final = {(0, 1): (-1, 2), (1, 2): (-1, 3)}
"""By the dimensions that are added, without and with one of samples before: the number of the last one."""


def idioms_of(tree: ast.Module) -> dict[int, str]:
    """Return the lines of such operations, and what each is: one of `record.line_calls`.

    Args:
        tree: of a file.
    """
    found: dict[int, str] = {}
    scopes = [tree, *(node for node in nodes_of(tree) if isinstance(node, Function))]  # the innermost last
    if any(isinstance(node, ast.keyword) and node.arg == "create_graph" for node in nodes_of(tree)):
        scopes = []  # not all of what would be better can be differentiated twice
    for scope in scopes:
        for line, has_gradients in _distances_of_pairs(scope).items():
            found[line] = PAIRS if has_gradients else PAIRS_FORWARD
    for node in nodes_of(tree):
        if isinstance(node, ast.Subscript) and _is_part_of_permutation(node):
            found.update(dict.fromkeys(lines_of(node), PERMUTATION))
    return found


def _is_part_of_permutation(node: ast.Subscript) -> bool:
    """Whether it is the first elements of a permutation that is used for nothing else."""
    match node:
        case ast.Subscript(value=ast.Call() as call, slice=ast.Slice(lower=None, upper=end)):
            return last_name(call) == "randperm" and isinstance(end, ast.Name | ast.Attribute | ast.Constant)
        case _:
            return False


def _distances_of_pairs(scope: ast.AST) -> dict[int, bool]:
    """The lines that make the differences of all pairs only for their distances, and whether backward goes through
    these: not where a function looks for the nearest."""
    found: dict[int, bool] = {}
    nodes = nodes_of(scope)
    has_gradients = _CHOOSES.isdisjoint(words_in(scope))
    reads = Counter(each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load))
    changed = {ast.unparse(each.target) for each in nodes if isinstance(each, ast.AugAssign)}
    names = {
        node.targets[0].id: node
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id not in changed
    }
    for node in nodes:
        if not isinstance(node, ast.Call) or (reduced := _reduced(node)) is None:
            continue
        differences, dimension = reduced
        made_by: list[ast.stmt | ast.expr] = [node]
        if isinstance(differences, ast.Name) and differences.id in names and reads[differences.id] == 1:
            made_by.append(names[differences.id])
            differences = names[differences.id].value
        if dimension in _LAST.get(_added_by(differences), ()):
            found.update((line, has_gradients) for each in made_by for line in lines_of(each))
    return found


def _reduced(call: ast.Call) -> tuple[ast.expr, int] | None:
    """What a call sums the squares of, and over which dimension: `x` and -1 of `x.pow(2).sum(-1)`; None: none."""
    if not isinstance(call.func, ast.Attribute):
        return None
    name, on = call.func.attr, call.func.value
    values = [*call.args] if word_of(on) in ("torch", "linalg") else [on, *call.args]
    named = [each.value for each in call.keywords if each.arg == "dim"]
    of_norm = 2  # `norm(x, p, dim)`
    dimensions = named or (values[of_norm:] if name in _NORMS else values[1:])
    if not values or len(dimensions) != 1 or (dimension := _number(dimensions[0])) is None:
        return None
    match values[0]:
        case ast.BinOp(left=squared, op=ast.Pow(), right=ast.Constant(value=2)) if name == "sum":
            return squared, dimension
        case ast.Call(func=ast.Attribute(value=squared, attr=square)) if name == "sum" and square in _SQUARES:
            return squared, dimension
        case _:
            return (values[0], dimension) if name in _NORMS else None


def _added_by(node: ast.expr) -> tuple[int, int]:
    """The dimensions that are added to the two sides of a difference, in order; the same: it is none of pairs."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
        return 0, 0
    left, right = _added(node.left), _added(node.right)
    return (0, 0) if left is None or right is None else (min(left, right), max(left, right))


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
