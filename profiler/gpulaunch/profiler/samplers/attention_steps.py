"""Finds in the source of a program attention that is computed step by step: scores, softmax, and a product with the
values. `scaled_dot_product_attention` makes no matrix of all scores.

Only where the matrix is used for nothing else, such as to be shown or returned, and nothing but a mask is added to it,
as a position bias that is learned.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import names_in, nodes_of, times_read, words_in

_PRODUCTS: Final = frozenset({"matmul", "bmm"})
_TURNED: Final = frozenset({"transpose", "permute", "mT", "T", "swapaxes"})
_MASKS: Final = frozenset({"masked_fill", "masked_fill_", "where"})
_MASK: Final = re.compile(r".*(?:mask|causal|tril|triu).*", re.IGNORECASE)


def lines_of_attention(tree: ast.Module) -> set[int]:
    """Return the lines of such statements.

    Args:
        tree: of a file.
    """
    functions = [node for node in nodes_of(tree) if isinstance(node, Function)]
    return {line for function in functions for line in _lines_in(function)}


def _lines_in(function: Function) -> Iterator[int]:
    reads = times_read(nodes_of(function))
    name, is_weights = "", False
    steps: list[ast.Assign | ast.Return] = []
    read = Counter[str]()
    for statement in nodes_of(function):
        if not isinstance(statement, ast.Assign | ast.Return) or statement.value is None:
            continue
        value = statement.value
        if not name or name not in names_in(value):
            if (found := _name(statement)) and _is_scores(value):
                name, is_weights, steps, read = found, _has_softmax(value), [statement], Counter()
            continue
        read[name] += 1
        steps.append(statement)
        product = _product(value)
        is_weights = is_weights or _has_softmax(value)
        if is_weights and product is not None and name in names_in(product[0]) and name not in names_in(product[1]):
            if all(reads[each] == times for each, times in read.items()):
                yield from (line for step in steps for line in lines_of(step))
            name = ""
        elif not _is_step(value, name) or not (name := _name(statement)):
            name = ""


def _name(statement: ast.stmt) -> str:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case _:
            return ""


def _is_scores(value: ast.expr) -> bool:
    """Whether it is a product with something turned, maybe scaled: `q @ k.transpose(-2, -1) / math.sqrt(size)`."""
    while isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
        value = value.left if _product(value.left) is not None or isinstance(value.left, ast.BinOp) else value.right
    product = _product(value)
    return product is not None and not _TURNED.isdisjoint(words_in(product[1]))


def _product(value: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    match value:
        case ast.BinOp(left=left, op=ast.MatMult(), right=right):
            return left, right
        case ast.Call(func=ast.Attribute(attr=name), args=[left, right]) if name in _PRODUCTS:
            return left, right
        case ast.Call(func=ast.Attribute(value=left, attr=name), args=[right]) if name in _PRODUCTS:
            return left, right
        case _:
            return None


def _has_softmax(value: ast.expr) -> bool:
    return any(last_name(call) == "softmax" for call in calls_in(value))


def _is_step(value: ast.expr, name: str) -> bool:
    """Whether it masks or scales the scores, or is softmax or dropout of them."""
    match value:
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
            return name in names_in(left) and name not in names_in(right)
        case ast.BinOp(op=ast.Add()):
            return any(map(_MASK.fullmatch, words_in(value)))
        case ast.Call():
            called = last_name(value)
            return called in _MASKS or called == "softmax" or "drop" in called
        case _:
            return False
