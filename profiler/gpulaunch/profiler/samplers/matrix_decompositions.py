"""Finds in the source of a program the matrices that an optimizer of its own decomposes.

    values, vectors = torch.linalg.eigh(factor)

They change little from step to step: Shampoo, SOAP and K-FAC keep what they get for 10 to 100 steps.
"""

from __future__ import annotations

import ast
from typing import Final

from gpulaunch.profiler.samplers.loops import calls_in, last_name, lines_of, word_of
from gpulaunch.profiler.samplers.syntax import nodes_of

_DECOMPOSES: Final = frozenset({"eigh", "eigvalsh", "cholesky_inverse"})
"""Of sums over many steps. Others are needed in every step, too: `svd` and `qr` make a momentum or a parameter
orthogonal, `inv` and `matrix_exp` keep a parameter on a manifold."""


def lines_of_decompositions(tree: ast.Module) -> set[int]:
    """Return the lines that decompose a matrix in the methods of an optimizer, or in functions that those call.

    Args:
        tree: of a file.
    """
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    optimizers = (node for node in nodes_of(tree) if isinstance(node, ast.ClassDef) and _is_optimizer(node))
    todo: list[ast.AST] = [*optimizers]
    found = set[int]()
    while todo:
        for call in calls_in(todo.pop()):
            if last_name(call) in _DECOMPOSES:
                found.update(lines_of(call))
            elif isinstance(call.func, ast.Name) and (called := functions.pop(call.func.id, None)) is not None:
                todo.append(called)
    return found


def _is_optimizer(of: ast.ClassDef) -> bool:
    return any(word_of(base) == "Optimizer" for base in of.bases)
