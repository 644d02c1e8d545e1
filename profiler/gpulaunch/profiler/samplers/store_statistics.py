"""Finds in the source of a program statistics of all that a store holds, to which a few rows at a time are added.

    def add(self, seen):
        self.seen[self.count % SIZE] = seen
        self.count += 1

    def scale(self):
        return self.seen[: self.count].mean(0), self.seen[: self.count].std(0)

A sum of the rows and one of their squares, from which the store takes the rows that it replaces, give the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from gpulaunch.profiler.samplers.function_bodies import is_set
from gpulaunch.profiler.samplers.loops import Function, lines_of, method_name, word_of
from gpulaunch.profiler.samplers.syntax import assigned_in, dotted, nodes_of, words_in

_STATISTICS: Final = frozenset({"mean", "std", "var"})


def lines_of_statistics(tree: ast.Module) -> set[int]:
    """Return the lines that compute them.

    Args:
        tree: of a file.
    """
    classes = (node for node in nodes_of(tree) if isinstance(node, ast.ClassDef))
    return {line for each in classes for line in _lines_in(each)}


def _lines_in(of: ast.ClassDef) -> set[int]:
    methods = [each for each in of.body if isinstance(each, Function) and each.name != "__init__"]
    nodes = [node for method in methods for node in nodes_of(method)]
    counters = {word_of(node.target) for node in nodes if isinstance(node, ast.AugAssign)} - {""}
    anew = {_attribute(target) for target, _ in assigned_in(nodes)}  # where the count begins again, or all is replaced
    in_place = (node.func for node in nodes if isinstance(node, ast.Call) and method_name(node).endswith("_"))
    anew |= {_attribute(function.value) for function in in_place if isinstance(function, ast.Attribute)}
    counters -= {each.removeprefix("self.") for each in anew}
    stores = {store for method in methods for store in _filled_in(method, counters)} - anew - {""}
    return {line for method in methods if stores for line in _statistics_in(method, stores)}


def _filled_in(method: Function, counters: set[str]) -> Iterator[str]:
    """The attributes of which a method sets the rows that a counter of the object gives."""
    nodes = nodes_of(method)
    for node in nodes:
        if isinstance(node, ast.Assign) and not counters.isdisjoint(words_in(node.value)):
            counters = counters | {each.id for each in node.targets if isinstance(each, ast.Name)}
    for node in nodes:
        match node:
            case ast.Subscript(value=of, slice=at) if is_set(node) and not counters.isdisjoint(words_in(at)):
                yield _attribute(of)
            case _:
                pass


def _statistics_in(method: Function, stores: set[str]) -> Iterator[int]:
    nodes = nodes_of(method)
    named = {
        each.id
        for node in nodes
        if isinstance(node, ast.Assign) and _store(node.value) in stores
        for each in node.targets
        if isinstance(each, ast.Name)
    }
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=on, attr=name), args=[] | [ast.Constant(value=0)], keywords=[]) if (
                name in _STATISTICS and (_store(on) in stores or word_of(on) in named)
            ):
                yield from lines_of(node)
            case _:
                pass


def _store(value: ast.expr) -> str:
    """The attribute that a value is, or is the first rows of; empty: it is another one."""
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice):
        value = value.value
    return _attribute(value)


def _attribute(node: ast.expr) -> str:
    """`self.seen`; empty: it is no attribute of the object itself."""
    name = dotted(node)
    return name if name.count(".") == 1 and name.startswith("self.") else ""
