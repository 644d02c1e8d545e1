"""Finds in the source of a program low-rank adapters that are added to the frozen weights before these are used.

    weight = self.weight + self.scale * (self.up @ self.down)
    return F.linear(x, weight)

makes a matrix as large as the weights, and backward makes the gradient of all of it; `F.linear(F.linear(x, self.down),
self.up)` beside the frozen layer makes neither.
"""

from __future__ import annotations

import ast
from collections.abc import Set

from gpulaunch.profiler.samplers.function_bodies import lines_without_gradients, registered_buffer
from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, lines_of, word_of
from gpulaunch.profiler.samplers.syntax import (
    assigned_in,
    dotted,
    nodes_of,
    times_read,
    words_in,
)


def lines_of_merges(tree: ast.Module) -> set[int]:
    """Return the lines of statements that add such a product to frozen weights, only for one linear layer.

    Args:
        tree: of a file.
    """
    frozen = {word_of(to) for to, value in assigned_in(nodes_of(tree)) if "requires_grad_" in words_in(value)}
    frozen |= set(map(registered_buffer, (node for node in nodes_of(tree) if isinstance(node, ast.stmt))))
    functions = [node for node in nodes_of(tree) if isinstance(node, Function)] if frozen - {""} else []
    return {line for each in functions for line in _lines_in(each, frozen)} - lines_without_gradients(tree)


def _lines_in(function: Function, frozen: Set[str]) -> set[int]:
    nodes = nodes_of(function)
    loops = (node for node in nodes if isinstance(node, ast.For | ast.While))
    repeated = {call for loop in loops for call in calls_in(loop)}
    layers = [call for call in calls_in(function) if last_name(call) == "linear" and len(call.args) > 1]
    reads = times_read(nodes)
    found = set[int]()
    for layer in layers:
        weights = layer.args[1]
        if isinstance(weights, ast.Name) and reads[weights.id] == 1 and layer not in repeated:
            sets = [node for node in nodes if isinstance(node, ast.Assign) and weights.id in map(dotted, node.targets)]
            if len(sets) == 1 and _is_merged(sets[0].value, frozen):
                found.update(lines_of(sets[0]))
    return found


def _is_merged(value: ast.expr, frozen: Set[str]) -> bool:
    """`self.weight + self.scale * (self.up @ self.down)`"""
    match value:
        case ast.BinOp(left=ast.Attribute() as weights, op=ast.Add(), right=added):
            return word_of(weights) in frozen and _is_product(added)
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
