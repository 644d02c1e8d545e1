"""Finds in the source of a program the functions that only observe tensors, such as a forward hook for statistics.

    def hook(module, inputs, output):
        self.spread[module] = output.detach().std()

It returns nothing, and what it computes has no gradient, so neither the model nor its loss needs it in every step.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import nodes_of

_WITHOUT_GRADIENTS: Final = frozenset({"detach", "no_grad", "inference_mode", "item"})
_STATISTICS: Final = frozenset(
    {
        *("mean", "std", "var", "norm", "vector_norm", "matrix_norm", "sum", "max", "min", "amax", "amin", "median"),
        *("quantile", "histc", "histogram", "count_nonzero", "isnan", "isinf", "isfinite", "cov", "corrcoef"),
    }
)
"""What is kept of features for a loss is more than these."""


def observers_of(tree: ast.Module) -> set[int]:
    """Return the lines of functions that only compute statistics of tensors, and return nothing."""
    return {line for function in _observers(tree) for line in lines_of(function)}


def _observers(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef) and not any(map(_is_more, nodes_of(node)[1:])):
            names = {last_name(call) for call in calls_in(node)}
            if not names.isdisjoint(_WITHOUT_GRADIENTS) and not names.isdisjoint(_STATISTICS):
                yield node


def _is_more(node: ast.AST) -> bool:
    """Whether a function with such a part gives something back, or is around another."""
    match node:
        case ast.Return(value=None | ast.Constant(value=None)):
            return False
        case _:
            return isinstance(node, Function | ast.Return | ast.Yield | ast.YieldFrom)
