"""Finds in the source of a program low-rank adapters that are added to the frozen weights before these are used.

    weight = self.weight + self.scale * (self.up @ self.down)
    return F.linear(x, weight)

makes a matrix as large as the weights, and backward makes the gradient of all of it; `F.linear(F.linear(x, self.down),
self.up)` beside the frozen layer makes neither.
"""

from __future__ import annotations

import ast

from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import dotted, nodes_of, times_read


def lines_of_merges(tree: ast.Module) -> set[int]:
    """Return the lines of statements that add such a product to weights, only for a linear layer.

    Args:
        tree: of a file.
    """
    return {line for node in nodes_of(tree) if isinstance(node, Function) for line in _lines_in(node)}


def _lines_in(function: Function) -> set[int]:
    nodes = nodes_of(function)
    layers = [call for call in calls_in(function) if last_name(call) == "linear" and len(call.args) > 1]
    reads = times_read(nodes)
    found = set[int]()
    for layer in layers:
        weights = layer.args[1]
        if isinstance(weights, ast.Name) and reads[weights.id] == 1:
            sets = [node for node in nodes if isinstance(node, ast.Assign) and weights.id in map(dotted, node.targets)]
            if len(sets) == 1 and _is_merged(sets[0].value):
                found.update(lines_of(sets[0]))
    return found


def _is_merged(value: ast.expr) -> bool:
    """`self.weight + self.scale * (self.up @ self.down)`"""
    match value:
        case ast.BinOp(left=ast.Attribute() as weights, op=ast.Add(), right=added):
            return dotted(weights) != "" and _is_product(added)
        case _:
            return False


def _is_product(value: ast.expr) -> bool:
    """Whether it is a product of two matrices of the layer, maybe scaled."""
    match value:
        case ast.BinOp(left=ast.Attribute() as left, op=ast.MatMult(), right=ast.Attribute() as right):
            return dotted(left).startswith("self.") and dotted(right).startswith("self.")
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
            return (_is_product(left) and dotted(right) != "") or (_is_product(right) and dotted(left) != "")
        case _:
            return False
