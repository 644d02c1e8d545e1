"""Finds in the source of a program the loops that take tensors apart, element by element, in Python.

Each element is an operation of torch, of about a microsecond, whatever is then done with the number. Only lines that do
nothing else count: one that computes with whole tensors may be what the step is for. What is at a position of two
nested loops (`rewards[t, e]`) is an element, or so small a part that one of the loops could be an operation.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence, Set
from operator import attrgetter
from typing import Final

from gpulaunch.profiler.samplers.loops import BACKWARD, MOVES, calls_in, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import names_in, nodes_of

_COUNTS: Final = frozenset({"round", "min", "max", "abs", "bool", "divmod", "pow"})
"""Builtin functions of numbers."""


def loops_over_elements(tree: ast.Module) -> dict[int, int]:
    """Return the lines, in loops and comprehensions, that take an element of a tensor in each turn and do nothing else
    than to count with it, or to put it elsewhere (`x = boxes[i, 0].item() * SIZE`, `target[i, int(x)] = 1.0`), and
    where the outermost of these loops begins.

    Args:
        tree: of a file.
    """
    found: dict[int, int] = {}
    for loop in nodes_of(tree):  # the outermost first
        if isinstance(loop, ast.For | ast.While):
            makes_steps = any(last_name(call) in BACKWARD for call in calls_in(loop))
            lines: Iterable[int] = () if makes_steps else _taking_elements(loop)
        elif isinstance(loop, ast.ListComp | ast.GeneratorExp | ast.SetComp):
            turns = {name for each in loop.generators for name in names_in(each.target)}
            numbers = {name for each in loop.generators for name in _numbers_of(each)}
            lines = lines_of(loop.elt) if _takes_elements(loop.elt, turns) and _counts(loop.elt, numbers) else ()
        else:
            continue
        for line in lines:
            found.setdefault(line, loop.lineno)
    return found


def _taking_elements(loop: ast.For | ast.While) -> set[int]:
    nodes = [each for statement in loop.body for each in nodes_of(statement)]
    loops = [each for each in (loop, *nodes) if isinstance(each, ast.For)]
    counters = _counters(nodes)
    turns = counters.union(name for each in loops for name in names_in(each.target))
    of_loops = [set(_numbers_of(each)) for each in loops]
    numbers = counters.union(*of_loops)
    found: set[int] = set()
    assignments = (each for each in nodes if isinstance(each, ast.Assign | ast.AugAssign))
    for node in sorted(assignments, key=attrgetter("lineno")):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id not in numbers:
            continue  # perhaps a tensor
        if not _counts(node.value, numbers, of_loops) or not all(_is_number(each, numbers) for each in targets):
            continue
        if found or _takes_elements(node, turns) or any(_is_element(each, of_loops) for each in nodes_of(node)):
            found.update(lines_of(node))
        numbers.update(each.id for target in targets for each in _stored(target))
    return found


def _counters(nodes: Sequence[ast.AST]) -> set[str]:
    """The names that statements count up or down, and that are positions: `i += 1`, and `boxes[i]`."""
    counted = set[str]()
    for node in nodes:
        match node:
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add() | ast.Sub(), value=ast.Constant(value=int())):
                counted.add(name)
            case _:
                pass
    at = {name for node in nodes if isinstance(node, ast.Subscript) for name in names_in(node.slice)}
    return counted & at


def _numbers_of(loop: ast.For | ast.comprehension) -> Iterator[str]:
    """The names that are numbers in each turn: those of `range`, and the first of `enumerate`."""
    turns = loop.iter
    if isinstance(turns, ast.Call) and last_name(turns) == "reversed" and turns.args:
        turns = turns.args[0]
    if not isinstance(turns, ast.Call):
        return
    if last_name(turns) == "range":
        yield from names_in(loop.target)
    elif last_name(turns) == "enumerate" and isinstance(loop.target, ast.Tuple):
        yield from names_in(loop.target.elts[0])


def _stored(target: ast.expr) -> Iterator[ast.Name]:
    return (each for each in nodes_of(target) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))


def _is_number(target: ast.expr, numbers: Set[str]) -> bool:
    """Whether what is assigned to is a name, or at a position that numbers give."""
    if isinstance(target, ast.Subscript):
        return _counts(target.slice, numbers)
    if isinstance(target, ast.Tuple | ast.List):
        return all(_is_number(each, numbers) for each in target.elts)
    return isinstance(target, ast.Name)


def _takes_elements(node: ast.AST, turns: Set[str]) -> bool:
    """Whether any call in a part of a tree is `item` of what is at a position that a turn of a loop gives."""
    return any(_is_item(call) and not turns.isdisjoint(names_in(call.func)) for call in calls_in(node))


def _is_item(call: ast.Call) -> bool:
    """Whether a call is `item` of a part of a tensor, which nothing is computed with before."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "item" or call.args:
        return False
    return all(last_name(each) in MOVES and not each.args for each in calls_in(call.func.value))


def _is_element(node: ast.AST, of_loops: Sequence[Set[str]]) -> bool:
    """Whether it is at a position that two loops give: `rewards[t + 1, e]`.

    Args:
        node: a part of a tree.
        of_loops: the names that are numbers in each turn of each loop.
    """
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple) or not node.slice.elts:
        return False
    given = [[at for at, names in enumerate(of_loops) if names_in(each) & names] for each in node.slice.elts]
    return all(given) and len({at for each in given for at in each}) > 1


def _counts(node: ast.AST, numbers: Set[str], of_loops: Sequence[Set[str]] = ()) -> bool:
    """Whether an expression is made of numbers alone: those that are known, constants, and elements of tensors."""
    match node:
        case ast.Subscript() if _is_element(node, of_loops):
            return _counts(node.slice, numbers)
        case ast.Call() if _is_item(node):
            return True
        case ast.Call(func=ast.Name(id=name)) if name in MOVES | _COUNTS:
            return all(_counts(each, numbers, of_loops) for each in node.args)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math"))):
            return all(_counts(each, numbers, of_loops) for each in node.args)
        case ast.Name(id=name):
            return name in numbers or name.isupper()
        case ast.Constant():
            return True
        case ast.BinOp(op=ast.MatMult()):
            return False
        case ast.BinOp() | ast.UnaryOp() | ast.Compare() | ast.BoolOp() | ast.IfExp() | ast.Tuple() | ast.Slice():
            parts = (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))
            return all(_counts(each, numbers, of_loops) for each in parts)
        case _:
            return False
