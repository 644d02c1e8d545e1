"""Goes through the syntax trees of a program's source."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

_KEPT: Final = "nodes of gpulaunch"


def nodes_of(node: ast.AST) -> Sequence[ast.AST]:
    """Return a part of a tree and all below it, the outermost first, as `ast.walk`; without the contexts of names.

    It takes a third of the time, and is remembered with the node: what a line is found by asks for the same parts.
    """
    known: list[ast.AST] | None = getattr(node, _KEPT, None)
    if known is not None:
        return known
    found = [node]
    for each in found:
        for name in each._fields:
            value: Any = getattr(each, name, None)
            if isinstance(value, list):
                found += [part for part in value if isinstance(part, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                found.append(value)
    setattr(node, _KEPT, found)
    return found


def names_in(node: ast.AST) -> set[str]:
    """The names in a part of a tree."""
    return {each.id for each in nodes_of(node) if isinstance(each, ast.Name)}


def assigned_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets of assignments, and what each is assigned: `a, b = 1, 2` are two.

    Args:
        nodes: all of a part of a tree.
    """
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                match target, node.value:
                    case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                        yield from zip(targets, values, strict=True)
                    case _:
                        yield target, node.value


def names_set(statement: ast.stmt) -> set[str]:
    """The names that an assignment sets; empty: it sets something else, too."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    parts = [part for each in targets for part in (each.elts if isinstance(each, ast.Tuple) else [each])]
    names = {each.id for each in parts if isinstance(each, ast.Name)}
    return names if all(isinstance(each, ast.Name) for each in parts) else set()


def times_read(nodes: Iterable[ast.AST]) -> Counter[str]:
    """How often each name is read in a part of a tree; `nodes`: all of it."""
    return Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))


def words_in(node: ast.AST) -> set[str]:
    """The names and the attributes in a part of a tree."""
    return names_in(node) | {each.attr for each in nodes_of(node) if isinstance(each, ast.Attribute)}


def dotted(node: ast.AST) -> str:
    """`self.h`; empty: it is more than names."""
    if isinstance(node, ast.Attribute):
        whole = dotted(node.value)
        return f"{whole}.{node.attr}" if whole else ""
    return node.id if isinstance(node, ast.Name) else ""


def root_of(node: ast.AST, *, views: bool = True) -> str:
    """The name of the object that something is a part, or a view, of: `mask` of `mask.data[0].view(-1)`; empty: it is
    none of a named object.

    Args:
        node: a term.
        views: what a call of a method, or of the object, returns counts as a view of it.
    """
    while isinstance(node, ast.Attribute | ast.Subscript) or (views and isinstance(node, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def forget_nodes(tree: ast.AST) -> None:
    """Forget what is remembered: a node and its list refer to each other, and would stay until garbage is collected."""
    for node in nodes_of(tree):
        vars(node).pop(_KEPT, None)
