"""Finds the attributes that a file declares to be whole numbers and that nothing sets later: those of a configuration,
`self.config.window`, and those that `__init__` keeps of its arguments, `self.window`.

A name counts if it is such a number wherever the file has it. Numbers with a fraction do not: a program may lower a
temperature from another file. Nor do those whose names say that they change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from gpulaunch.profiler.samplers.function_bodies import inits_of, is_set
from gpulaunch.profiler.samplers.syntax import assigned_in, nodes_of

_TYPES: Final = frozenset({"int", "bool", "str"})
_CONFIGURATION: Final = re.compile(r"_?(?:\w+_)?(?:config|cfg|conf|args|opts?|options|hparams|settings)")
_CHANGES: Final = re.compile(
    r"(?:current|cur|num_updates)(?:_\w+)?|(?:\w+_)?(?:step|epoch|level|stage|phase|iteration)"
)
"""Names of what a training loop sets."""

_MOST_ROUNDS: Final = 8
"""Numbers that are computed of each other, one after the other; with more, none counts."""


class DeclaredNumbers:
    """The attributes of the objects of a file that are numbers, or texts, and stay as they are."""

    def __init__(
        self,
        classes: Collection[ast.ClassDef],
        attributes: Mapping[str, list[ast.Attribute]],
        others: Collection[object],
    ) -> None:
        """`attributes`: of the file, by name. `others`: names of functions, and texts, by which one may be set."""
        self._kept = {of: dict(_kept_by(of)) for of in classes}
        self._values: dict[str, list[_Kept]] = {}
        for name, found in (each for kept in self._kept.values() for each in kept.items()):
            self._values.setdefault(name, []).append(found)
        kept_nodes = {to for found in self._values.values() for to, _, _ in found}
        stores = {name: [each for each in nodes if is_set(each)] for name, nodes in attributes.items()}
        changed = {name for name, found in stores.items() if not kept_nodes.issuperset(found)}
        self._whole = self._values.keys() - changed
        fields = [field for of in classes for field in _fields_of(of)]
        changed |= {name for name, is_number in fields if not is_number}
        names = self._values.keys() | {name for name, _ in fields}
        self._names = {name for name in names - changed if name not in others and not _CHANGES.fullmatch(name)}
        for _ in range(_MOST_ROUNDS):
            no_numbers = {name for name in self._names if not self._is_always_number(name)}
            self._names -= no_numbers
            if not no_numbers:
                return
        self._names.clear()

    def has(self, node: ast.Attribute, of: ast.ClassDef | None) -> bool:
        """Whether an attribute, in a method of a class, is one of them.

        Args:
            node: `self.window` or `self.config.window`.
            of: the class.
        """
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return of is not None and bool(of.bases) and name in self._kept[of] and name in self._names
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=whole), attr=name):
                return bool(_CONFIGURATION.fullmatch(whole)) and whole in self._whole and name in self._names
            case _:
                return False

    def _is_always_number(self, name: str) -> bool:
        return all(self._is_number(value, given) for _, value, given in self._values.get(name, ()))

    def _is_number(self, value: ast.expr, given: Collection[str]) -> bool:
        match value:
            case ast.Name(id=name):
                return name in given
            case ast.Attribute(value=ast.Name(id=whole), attr=name):
                return bool(_CONFIGURATION.fullmatch(whole)) and name in self._names
            case ast.BinOp(left=left, right=right):
                parts = [each for each in (left, right) if not isinstance(each, ast.Constant)]
                return bool(parts) and all(self._is_number(each, given) for each in parts)
            case _:
                return False


_Kept = tuple[ast.Attribute, ast.expr, Collection[str]]
"""What is set, to what, and the arguments of the function that are declared as numbers."""


def _kept_by(of: ast.ClassDef) -> Iterator[tuple[str, _Kept]]:
    """What `__init__` sets on `self` in any case; the last of several times."""
    for init in inits_of(of):
        given = _numbers_given(init)
        for to, value in assigned_in(init.body):
            if isinstance(to, ast.Attribute) and isinstance(to.value, ast.Name) and to.value.id == "self":
                yield to.attr, (to, value, given)


def _fields_of(of: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """Names that the body of a class gives a type or a value, and whether it is a number."""
    for statement in of.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, _is_type(statement.annotation)
    for name, value in assigned_in(of.body):
        if isinstance(name, ast.Name):
            yield name.id, isinstance(value, ast.Constant) and isinstance(value.value, int | str)


def _numbers_given(function: ast.FunctionDef) -> set[str]:
    """Arguments that are declared as numbers, and that a function does not set."""
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    numbers = {each.arg for each in arguments if each.annotation and _is_type(each.annotation)}
    return numbers - {node.id for node in nodes_of(function) if isinstance(node, ast.Name) and is_set(node)}


def _is_type(annotation: ast.expr) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id in _TYPES
