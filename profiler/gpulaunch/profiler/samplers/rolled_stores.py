"""Finds in the source of a program stores of the newest rows that are copied as a whole for each few of them.

    self.seen = torch.cat([self.seen, seen])[-SIZE:]

With a position that goes around, `self.seen[at] = seen` writes only the new rows.
"""

from __future__ import annotations

import ast
from typing import Final

from gpulaunch.profiler.samplers.loops import calls_in, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import assigned_in, dotted, nodes_of

_JOINS: Final = frozenset({"cat", "concat", "concatenate", "vstack", "append"})


def lines_of_copies(tree: ast.Module) -> set[int]:
    """Return the lines that copy such a store.

    Args:
        tree: of a file.
    """
    found = set[int]()
    for target, value in assigned_in(nodes_of(tree)):
        if dotted(target) and dotted(target) == _rolled(value):
            found.update(lines_of(value))
    for call in calls_in(tree):
        match call:
            case ast.Call(func=ast.Name(id="setattr"), args=[of, name, value]):
                if _rolled(value) == f"getattr({ast.unparse(of)}, {ast.unparse(name)})":
                    found.update(lines_of(call))
            case _:
                pass
    return found


def _rolled(value: ast.expr) -> str:
    """The store to which other rows are joined, and of which a value is the last rows; empty: it is no such value."""
    match value:
        case ast.Subscript(value=ast.Call(args=[parts, *_]) as join, slice=ast.Slice(lower=ast.UnaryOp(op=ast.USub()))):
            if last_name(join) in _JOINS:
                return ast.unparse(parts.elts[0] if isinstance(parts, ast.List | ast.Tuple) and parts.elts else parts)
        case _:
            pass
    return ""
