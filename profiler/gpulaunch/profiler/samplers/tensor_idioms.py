"""Finds in the source of a program operations on tensors for which others do far less.

`(a[:, None] - b[None]).pow(2).sum(-1)` makes a tensor of pairs x width, several times, and again in backward;
`torch.cdist(a, b)` or a product of matrices makes one of pairs. That is told where the differences are used for nothing
else. `torch.randperm(len(data))[:32]` draws a permutation of all samples for each batch. `torch.linalg.svdvals(w)[0]`
and `matrix_norm(w, 2)` compute all singular values for the largest one.
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import Final

from gpulaunch.profiler.record.line_calls import (
    ADAPTER,
    ATTENTION,
    CELL,
    DENSE_TARGETS,
    GRAPH_MATRIX,
    PAIRS,
    PAIRS_FORWARD,
    PERMUTATION,
    ROLLED,
    SINGULAR,
    SINGULAR_FORWARD,
    STATISTICS,
)
from gpulaunch.profiler.samplers.attention_steps import lines_of_attention
from gpulaunch.profiler.samplers.dense_graphs import lines_of_products
from gpulaunch.profiler.samplers.dense_targets import lines_of_dense_targets
from gpulaunch.profiler.samplers.function_bodies import lines_without_gradients
from gpulaunch.profiler.samplers.loops import Function, last_name, lines_of, word_of
from gpulaunch.profiler.samplers.merged_adapters import lines_of_merges
from gpulaunch.profiler.samplers.recurrent_cells import lines_of_cells
from gpulaunch.profiler.samplers.rolled_stores import lines_of_copies
from gpulaunch.profiler.samplers.store_statistics import lines_of_statistics
from gpulaunch.profiler.samplers.syntax import nodes_of, times_read, words_in

_SQUARES: Final = frozenset({"pow", "square"})
_NORMS: Final = frozenset({"norm", "vector_norm"})
_CHOOSES: Final = frozenset(
    {"argmin", "argmax", "argsort", "topk", "sort", "indices", "detach", "no_grad", "inference_mode"}
)
"""Words of a function by which backward may not go through all distances."""
_LARGEST: Final = frozenset({"max", "amax"})
_LAST: Final = {(0, 1): (-1, 2), (1, 2): (-1, 3)}
"""By the dimensions that are added, without and with one of samples before: the number of the last one."""


def idioms_of(tree: ast.Module) -> dict[int, str]:
    """Return the lines of such operations, and what each is: one of `record.line_calls`.

    Args:
        tree: of a file.
    """
    found: dict[int, str] = {}
    scopes = [tree, *(node for node in nodes_of(tree) if isinstance(node, Function))]  # the innermost last
    without_gradients = lines_without_gradients(tree)
    for line in set[int]().union(*map(_largest_singular_values, scopes)):
        found[line] = SINGULAR_FORWARD if line in without_gradients else SINGULAR
    if any(isinstance(node, ast.keyword) and node.arg == "create_graph" for node in nodes_of(tree)):
        scopes = []  # not all of what would be better can be differentiated twice
    for scope in scopes:
        for line, has_gradients in _distances_of_pairs(scope).items():
            found[line] = PAIRS if has_gradients else PAIRS_FORWARD
    for node in nodes_of(tree):
        if isinstance(node, ast.Subscript) and _is_part_of_permutation(node):
            found.update(dict.fromkeys(lines_of(node), PERMUTATION))
    for lines, idiom in (
        *((lines_of_cells, CELL), (lines_of_attention, ATTENTION), (lines_of_merges, ADAPTER)),
        *((lines_of_statistics, STATISTICS), (lines_of_products, GRAPH_MATRIX), (lines_of_copies, ROLLED)),
        (lines_of_dense_targets, DENSE_TARGETS),
    ):
        found.update(dict.fromkeys(lines(tree), idiom))
    return found


def _is_part_of_permutation(node: ast.Subscript) -> bool:
    """Whether it is the first elements of a permutation that is used for nothing else."""
    match node:
        case ast.Subscript(value=ast.Call() as call, slice=ast.Slice(lower=None, upper=end)):
            return last_name(call) == "randperm" and isinstance(end, ast.Name | ast.Attribute | ast.Constant)
        case _:
            return False


def _largest_singular_values(scope: ast.AST) -> set[int]:
    """The lines that compute singular values of which only the largest is used."""
    nodes = nodes_of(scope)
    found: set[int] = set()
    of_name: dict[str, ast.Call] = {}
    for node in nodes:
        match node:
            case ast.Call() as call if last_name(call) == "matrix_norm" and _is_spectral(call):
                found.update(lines_of(call))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if last_name(call) == "svdvals":
                of_name[name] = call
            case ast.Assign(targets=[ast.Tuple(elts=[_, ast.Name(id=name), _])], value=ast.Call() as call) if (
                last_name(call) == "svd"
            ):
                of_name[name] = call
            case _:
                pass
    largest = [value for node in nodes if (value := _largest_of(node)) is not None]
    for value in largest:
        if (decomposes := _decomposition(value)) is not None:
            found.update(lines_of(decomposes))
    reads = times_read(nodes)
    of_largest = Counter(value.id for value in largest if isinstance(value, ast.Name))
    for name, call in of_name.items():
        if reads[name] == of_largest[name] > 0:
            found.update(lines_of(call))
    return found


def _is_spectral(call: ast.Call) -> bool:
    """`matrix_norm(w, 2)`, `matrix_norm(w, ord=2)`."""
    orders = [*call.args[1:2], *(each.value for each in call.keywords if each.arg == "ord")]
    return len(orders) == 1 and _number(orders[0]) == 2


def _largest_of(node: ast.AST) -> ast.expr | None:
    """What a node takes the first or the largest element of; None: it does something else."""
    match node:
        case ast.Subscript(value=value, slice=ast.Constant(value=0)):
            return value
        case ast.Subscript(value=value, slice=ast.Tuple(elts=[ast.Constant(value=x), ast.Constant(value=0)])) if (
            x is Ellipsis
        ):
            return value
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _LARGEST:
            return value
        case _:
            return None


def _decomposition(values: ast.expr) -> ast.Call | None:
    """The call that computes singular values: `svdvals(w)`, `svd(w)[1]`, `svd(w).S`."""
    match values:
        case ast.Call() as call if last_name(call) == "svdvals":
            return call
        case ast.Subscript(value=ast.Call() as call, slice=ast.Constant(value=1)) if last_name(call) == "svd":
            return call
        case ast.Attribute(value=ast.Call() as call, attr="S") if last_name(call) == "svd":
            return call
        case _:
            return None


def _distances_of_pairs(scope: ast.AST) -> dict[int, bool]:
    """The lines that make the differences of all pairs only for their distances, and whether backward goes through
    these: not where a function looks for the nearest."""
    found: dict[int, bool] = {}
    nodes = nodes_of(scope)
    has_gradients = _CHOOSES.isdisjoint(words_in(scope))
    reads = times_read(nodes)
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
