"""Finds in the source of a program collectives of a loop that need each other's results.

    for _ in range(3):
        mass = share.sum(0)
        dist.all_reduce(mass)
        share /= mass

Each turn begins with what the last one has reduced, as in Sinkhorn's algorithm, a power iteration or conjugate
gradients: they are not to be put into one tensor.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from gpulaunch.profiler.samplers.changed_objects import reachable
from gpulaunch.profiler.samplers.loops import calls_in, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import assigned_in, names_in, nodes_of


def lines_of_chained(tree: ast.Module, makes_steps: Callable[[ast.AST], bool]) -> set[int]:
    """Return the lines of such collectives.

    Args:
        tree: of a file.
        makes_steps: whether a loop is that of the training steps: what one of them leaves to the next is no reason.
    """
    found = set[int]()
    for loop in nodes_of(tree):
        if isinstance(loop, ast.For | ast.While) and not makes_steps(loop):
            needs = _needs(loop)
            for call in calls_in(loop):
                match call:
                    case ast.Call(args=[ast.Name(id=reduced), *_]) if last_name(call) == "all_reduce":
                        if reduced in reachable(needs.get(reduced, set()) - {reduced}, needs):
                            found.update(lines_of(call))
                    case _:
                        pass
    return found


def _needs(loop: ast.For | ast.While) -> dict[str, set[str]]:
    """Of each name that a turn of a loop gives a value, or changes, the names that this is computed from. A part of an
    object may be another one in each turn: it needs nothing of the last one."""
    needs: dict[str, set[str]] = {}
    for target, value in _values(loop):
        if isinstance(target, ast.Name):
            needs.setdefault(target.id, set()).update(names_in(value))
    return needs


def _values(loop: ast.For | ast.While) -> Iterator[tuple[ast.expr, ast.expr]]:
    nodes = nodes_of(loop)
    yield from assigned_in(nodes)
    for node in nodes:
        match node:
            case ast.AugAssign(target=target, value=value):
                yield target, value
            case ast.Call(func=ast.Attribute(attr=method, value=target)) if method.endswith("_"):  # `div_(mass)`
                yield target, node
            case _:
                pass
