"""Finds in the source of a program losses that each rank computes of the pairs of all ranks.

    all_images, all_texts = Gathered.apply(images), Gathered.apply(texts)
    logits = scale * all_images @ all_texts.T
    return cross_entropy(logits, labels)

If gradients go back through what gathers, the rows of the rank's own samples do: the other ranks compute theirs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import dotted, names_in, nodes_of, root_of, words_in

_GATHERS: Final = frozenset({"all_gather", "all_gather_into_tensor", "_all_gather_base"})
_SUMS: Final = frozenset({"all_reduce", "reduce_scatter", "reduce_scatter_tensor"})
"""What backward adds the gradients of all ranks up with: without that, each rank needs all rows for its own."""
_TURNED: Final = frozenset({"T", "mT", "t", "transpose", "permute"})
_LOSSES: Final = frozenset({"cross_entropy", "log_softmax", "softmax", "logsumexp"})


def lines_of_gathered_pairs(tree: ast.Module) -> dict[int, int]:
    """Return the lines of such products, and of the losses of them, and for each the line of the product.

    Args:
        tree: of a file.
    """
    gathers = {
        node.name
        for node in nodes_of(tree)
        if isinstance(node, ast.ClassDef)
        and any(dotted(base).endswith("Function") for base in node.bases)
        and not _GATHERS.isdisjoint(called := set(map(last_name, calls_in(node))))
        and not _SUMS.isdisjoint(called)
    }
    functions = [node for node in nodes_of(tree) if isinstance(node, Function)] if gathers else []
    return {line: first for each in functions for line, first in _lines_in(each, gathers)}


def _lines_in(function: Function, gathers: set[str]) -> Iterator[tuple[int, int]]:
    gathered, pairs, first = set[str](), set[str](), 0
    statements = [node for node in nodes_of(function) if isinstance(node, ast.Assign | ast.Return)]
    for statement in sorted(statements, key=lambda each: each.lineno):
        if (value := statement.value) is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        names = {name for target in targets for name in names_in(target)}
        values = value.elts if isinstance(value, ast.Tuple) else [value]
        if all(isinstance(each, ast.Call) and root_of(each) in gathers for each in values):
            gathered |= names
        elif any(_is_of_all(node, gathered) for node in nodes_of(value)):
            pairs, first = pairs | names, statement.lineno
            yield from ((line, first) for line in lines_of(statement))
        elif root_of(value) in pairs:  # turned
            pairs |= names
        elif any(last_name(call) in _LOSSES and not pairs.isdisjoint(names_in(call)) for call in calls_in(value)):
            yield from ((line, first) for line in lines_of(statement))


def _is_of_all(node: ast.AST, gathered: set[str]) -> bool:
    """Whether it is a product of the rows of two matrices that were gathered: `a @ b.T`, not `a.T @ b`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.MatMult):
        return False
    if gathered.isdisjoint(names_in(node.left)) or gathered.isdisjoint(names_in(node.right)):
        return False
    return _TURNED.isdisjoint(words_in(node.left)) and not _TURNED.isdisjoint(words_in(node.right))
