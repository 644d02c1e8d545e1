"""Finds the attributes that a file declares to be numbers and that nothing in it sets again: those of a configuration,
`self.config.window`, and those that `__init__` keeps, `self.window`."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from gpulaunch.profiler.samplers.function_bodies import is_set
from gpulaunch.profiler.samplers.loops import Function
from gpulaunch.profiler.samplers.syntax import assigned_in, nodes_of

_TYPES: Final = frozenset({"int", "float", "bool", "str"})


class DeclaredNumbers:
    """The attributes of the objects of a file that are numbers, or texts, and stay as they are."""

    def __init__(self, classes: Collection[ast.ClassDef], attributes: Mapping[str, list[ast.Attribute]]) -> None:
        """`attributes`: of the file, by name."""
        stores = {name: {node for node in nodes if is_set(node)} for name, nodes in attributes.items()}
        fields = {of: dict(_fields_of(of)) for of in classes}
        on_self = {of: {node for node in nodes_of(of) if _is_of_self(node)} for of in classes}

        def is_field(name: str) -> bool:
            of_others = (on_self[of] for of in classes if name not in fields[of])
            return all(each.get(name, True) for each in fields.values()) and not (
                stores.get(name, set[ast.AST]()).difference(*of_others)
            )

        self._fields = set(filter(is_field, {name for each in fields.values() for name in each}))
        """What the bodies of classes declare as a number."""
        self._numbers: dict[ast.ClassDef, set[str]] = {}
        self._objects = set[str]()
        kept: dict[str, set[ast.Attribute]] = {}
        for of in classes:
            numbers, found = set[str](), set[str]()
            for init in (each for each in of.body if isinstance(each, Function) and each.name == "__init__"):
                given = _numbers_given(init)
                for to, value in assigned_in(init.body):
                    if isinstance(to, ast.Attribute) and to.attr not in found:
                        found.add(to.attr)
                        kept.setdefault(to.attr, set()).add(to)
                        numbers |= {to.attr} if self._is_number(value, given) else set()
                        self._objects |= {to.attr} if isinstance(value, ast.Name) else set()
            self._numbers[of] = numbers
        self._changed = {name for name, found in stores.items() if found != kept.get(name)}
        """Attributes that something else sets than `__init__`, once in a class."""

    def has(self, node: ast.Attribute, of: ast.ClassDef | None) -> bool:
        """Whether an attribute, in a method of a class, is one of them.

        Args:
            node: `self.window` or `self.config.window`.
            of: the class.
        """
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return of is not None and name in self._numbers[of] - self._changed
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=whole), attr=name):
                return name in self._fields and whole in self._objects - self._changed
            case _:
                return False

    def _is_number(self, value: ast.expr, given: Collection[str]) -> bool:
        match value:
            case ast.Constant(value=int() | float()):
                return True
            case ast.Name(id=name):
                return name in given
            case ast.Attribute(value=ast.Name(), attr=name):
                return name in self._fields
            case ast.BinOp(left=left, right=right):
                return self._is_number(left, given) and self._is_number(right, given)
            case _:
                return False


def _fields_of(of: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """Names that the body of a class gives a type or a value, and whether it is a number."""
    for statement in of.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, _is_type(statement.annotation)
    for name, value in assigned_in(of.body):
        if isinstance(name, ast.Name):
            yield name.id, isinstance(value, ast.Constant)


def _numbers_given(function: Function) -> set[str]:
    """Arguments that are declared as numbers, or are one by default, and that a function does not set."""
    of = function.args
    plain = [*of.posonlyargs, *of.args]
    by_default = list(zip(reversed(plain), reversed(of.defaults), strict=False))
    by_default += [(each, value) for each, value in zip(of.kwonlyargs, of.kw_defaults, strict=True) if value]
    numbers = {
        each.arg
        for each, value in by_default
        if not each.annotation and isinstance(value, ast.Constant) and isinstance(value.value, int | float)
    }
    numbers |= {each.arg for each in (*plain, *of.kwonlyargs) if each.annotation and _is_type(each.annotation)}
    return numbers - {node.id for node in nodes_of(function) if isinstance(node, ast.Name) and is_set(node)}


def _is_type(annotation: ast.expr) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id in _TYPES


def _is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
