"""Reads in the source of a program which names its statements set, fill and change."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Final

Function = ast.FunctionDef | ast.AsyncFunctionDef

_SCALARS: Final = frozenset({"int", "float", "bool", "str"})
_CHANGING: Final = frozenset({"append", "extend", "insert", "update", "pop", "clear"})
"""Methods that change their object, besides those whose names end with an underscore."""


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements of a body and of the blocks in it, in order; not those of functions and classes in it."""
    for statement in body:
        yield statement
        if isinstance(statement, Function | ast.ClassDef):
            continue
        for name in ("body", "orelse", "handlers", "finalbody"):
            for part in getattr(statement, name, ()):
                yield from statements(part.body if isinstance(part, ast.ExceptHandler) else [part])


def value_of(statement: ast.stmt) -> ast.expr | None:
    """What a statement computes, and gives to a name or returns."""
    return statement.value if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return) else None


def names_set(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement sets by itself, not in its blocks."""
    if isinstance(statement, Function | ast.ClassDef):
        yield statement.name
        return
    for part in ast.iter_child_nodes(statement):
        if not isinstance(part, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from (node.id for node in ast.walk(part) if isinstance(node, ast.Name) and not _is_read(node))


def names_filled(statement: ast.stmt) -> Iterator[tuple[str, str, list[ast.expr]]]:
    """Names of objects that a statement changes in place, by which method ("": an assignment), and the values that it
    changes them with: `mask[i] = 1`, `mask.tril_()`."""
    match statement:
        case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=index)], value=value):
            yield name, "", [index, value]
        case ast.AugAssign(target=ast.Subscript(value=ast.Name(id=name), slice=index), value=value):
            yield name, "", [index, value]
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method), args=args)):
            if _is_changing(method):
                yield name, method, args
        case _:
            pass


def names_changed(tree: ast.Module) -> Iterator[str]:
    """Names of attributes and variables that anything in a file changes after they were set."""
    inits = {id(node) for of in ast.walk(tree) if _is_init(of) for node in ast.walk(of)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()) if id(node) not in inits:
                yield name
            case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
                yield from _chain(value)
            case ast.AugAssign(target=target):
                yield from _chain(target)
            case ast.Call(func=ast.Attribute(value=value, attr=method)) if _is_changing(method):
                yield from _chain(value)
            case ast.Call(func=ast.Name(id="setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                yield name
            case ast.Global(names=names):
                yield from names
            case ast.keyword(arg="out", value=value):
                yield from _chain(value)
            case _:
                pass


def _is_init(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


def _is_changing(method: str) -> bool:
    """Whether a method changes its object: `add_`, `append`."""
    return (method.endswith("_") and not method.startswith("_")) or method in _CHANGING


def _is_read(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


def _chain(node: ast.AST) -> Iterator[str]:
    """`a.b[0].c` gives c, b and a."""
    while True:
        if isinstance(node, ast.Attribute):
            yield node.attr
            node = node.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            break
    if isinstance(node, ast.Name):
        yield node.id


def names_imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that imports give, and the packages that these are of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [(each.asname, each.name.partition(".")[0]) for each in node.names]
            yield from ((name or package, package) for name, package in modules)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            package = node.module.partition(".")[0]
            yield from ((each.asname or each.name, package) for each in node.names)


def arguments_of(function: Function) -> list[ast.arg]:
    """All of them, with `*args` and `**kwargs`."""
    return [node for node in ast.walk(function.args) if isinstance(node, ast.arg)]


def scalar_arguments(function: Function) -> set[str]:
    """Names of the arguments that are numbers or texts, by their annotations or defaults."""
    of = function.args
    positional = [*of.posonlyargs, *of.args][::-1]
    given = [*zip(positional, of.defaults[::-1], strict=False), *zip(of.kwonlyargs, of.kw_defaults, strict=True)]
    found = {each.arg for each, value in given if isinstance(value, ast.Constant) and value.value is not None}
    for each in arguments_of(function):
        if isinstance(each.annotation, ast.Name) and each.annotation.id in _SCALARS:
            found.add(each.arg)
    return found
