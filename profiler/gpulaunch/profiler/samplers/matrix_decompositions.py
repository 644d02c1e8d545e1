"""Finds in the source of a program the matrices that an optimizer of its own decomposes.

    factor.addmm_(grad, grad.T)
    values, vectors = torch.linalg.eigh(factor)

A sum over many steps changes little from step to step: Shampoo, SOAP and K-FAC keep what they get for 10 to 100 steps.
"""

from __future__ import annotations

import ast
from typing import Final

from gpulaunch.profiler.samplers.function_bodies import optimizers_in
from gpulaunch.profiler.samplers.loops import calls_in, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import dotted, nodes_of, root_of

_DECOMPOSES: Final = frozenset({"eigh", "eigvalsh", "cholesky_inverse"})
"""Of what is known by a name. Others are needed in every step, too: `svd` and `qr` make a momentum or a parameter
orthogonal, `inv` and `matrix_exp` keep a parameter on a manifold."""
_ADDS_PRODUCT: Final = frozenset({"addmm_", "addbmm_", "baddbmm_", "addr_"})
_ADDS: Final = frozenset({"add_", "lerp_"})


def lines_of_decompositions(tree: ast.Module) -> set[int]:
    """Return the lines that decompose a matrix in the methods of an optimizer, or in functions that those call.

    Args:
        tree: of a file.
    """
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    todo: list[ast.AST] = [each for each in optimizers_in(tree) if any(map(_adds_product, calls_in(each)))]
    found = set[int]()
    while todo:
        for call in calls_in(todo.pop()):
            if last_name(call) in _DECOMPOSES and call.args and dotted(call.args[0]):
                found.update(lines_of(call))
            elif isinstance(call.func, ast.Name) and (called := functions.pop(call.func.id, None)) is not None:
                todo.append(called)
    return found


def _adds_product(call: ast.Call) -> bool:
    """`factor.addmm_(grad, grad.T)`, `factor.lerp_(grad @ grad.T, 0.05)`"""
    if last_name(call) in _ADDS_PRODUCT:
        return True
    products = (node for each in call.args for node in nodes_of(each) if isinstance(node, ast.BinOp))
    return last_name(call) in _ADDS and any(
        isinstance(node.op, ast.MatMult) and root_of(node.left) == root_of(node.right) != "" for node in products
    )
