"""Finds in the source of a program products with the matrix of a batch of graphs, nearly all of which is zero.

    neighbours = torch.zeros(total, total)      # in what collates the graphs
    neighbours[starts, ends] = 1
    ...
    heard = neighbours @ h                      # in the model

It has a block for each graph of the batch, and zeros between them. With a list of the edges,
`torch.zeros_like(h).index_add_(0, starts, h[ends])` adds as many rows as there are edges.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, lines_of, word_of
from gpulaunch.profiler.samplers.syntax import nodes_of

_PRODUCTS: Final = frozenset({"mm", "matmul"})


def lines_of_products(tree: ast.Module) -> set[int]:
    """Return the lines of such products.

    Args:
        tree: of a file, in which both the matrix and the product are.
    """
    collates = {
        word_of(each.value) for each in nodes_of(tree) if isinstance(each, ast.keyword) and each.arg == "collate_fn"
    }
    functions = [node for node in nodes_of(tree) if isinstance(node, Function)] if collates else []
    matrices = {name for each in functions if each.name in collates for name in _matrices_in(each)}
    products = (node for node in nodes_of(tree) if isinstance(node, ast.expr)) if matrices else ()
    return {line for node in products if _factor(node) in matrices for line in lines_of(node)}


def _matrices_in(collate: Function) -> Iterator[str]:
    """The names of square matrices of zeros of which a function sets elements to one number, and of those that have
    blocks; not of one for each graph, which is made in a loop."""
    loops = [each for each in nodes_of(collate) if isinstance(each, ast.For | ast.While)]
    in_loops = {node for loop in loops for node in nodes_of(loop)}
    assigns = [each for each in nodes_of(collate) if isinstance(each, ast.Assign) and each not in in_loops]
    ones = {
        word_of(target.value)
        for each in assigns
        for target in each.targets
        if isinstance(each.value, ast.Constant) and isinstance(target, ast.Subscript) and _is_of_elements(target.slice)
    }
    for each in assigns:
        match each:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                calls = {last_name(call): call for call in calls_in(value)}
                if "block_diag" in calls or (name in ones and "zeros" in calls and _is_square(calls["zeros"])):
                    yield name
            case _:
                pass


def _is_of_elements(index: ast.expr) -> bool:
    """`[starts, ends]`"""
    match index:
        case ast.Tuple(elts=[first, second]):
            return not isinstance(first, ast.Slice | ast.Constant) and not isinstance(second, ast.Slice | ast.Constant)
        case _:
            return False


def _is_square(zeros: ast.Call) -> bool:
    sizes = zeros.args[0].elts if len(zeros.args) == 1 and isinstance(zeros.args[0], ast.Tuple) else zeros.args
    return len(sizes) == 2 and ast.unparse(sizes[0]) == ast.unparse(sizes[1])


def _factor(node: ast.expr) -> str:
    """The name of the first factor of a product of matrices; empty: it is none."""
    match node:
        case ast.BinOp(left=left, op=ast.MatMult()):
            return word_of(left)
        case ast.Call(func=ast.Attribute(attr=name), args=[left, _]) if name in _PRODUCTS:
            return word_of(left)
        case ast.Call(func=ast.Attribute(value=left, attr=name), args=[_]) if name in _PRODUCTS:
            return word_of(left)
        case _:
            return ""
