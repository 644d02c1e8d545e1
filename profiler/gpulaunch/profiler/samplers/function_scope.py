"""Decides which names and expressions of a function are the same in every call of it."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Set
from typing import TYPE_CHECKING, Final

from gpulaunch.profiler.samplers.function_bodies import arguments_of, changed_by, is_plain_call, is_set
from gpulaunch.profiler.samplers.layer_inputs import is_alike
from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name
from gpulaunch.profiler.samplers.syntax import names_in, names_set, nodes_of
from gpulaunch.profiler.samplers.tensor_functions import (
    COMPUTE,
    FILLS,
    NUMBERS,
    OF_A_TENSOR,
    ROOM,
    SCALARS,
    SHAPES,
    TRANSPOSED,
    VIEWS,
)

if TYPE_CHECKING:
    from gpulaunch.profiler.samplers.constants import Module

_WHERE: Final = frozenset({"device", "dtype"})
"""Attributes of a tensor that do not change at all."""
_OF_PARTS: Final = (
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.IfExp),
    *(ast.Tuple, ast.List, ast.Subscript, ast.Slice),
)
"""Expressions that are the same where their parts are."""


class Scope:
    """Which names of a function stay the same."""

    def __init__(self, module: Module, function: Function, of: ast.ClassDef | None, names: Set[str] | None) -> None:
        """`names`: of arguments that all layers of a model are given alike; none: it is every call that is looked at;
        None: all arguments are taken to be the same."""
        self._module = module
        self._of = of
        self._set: dict[str, list[int]] = {}
        self._read: dict[str, list[ast.Name]] = {}
        for node in nodes_of(function):
            if isinstance(node, ast.Name) and is_set(node):
                self._set.setdefault(node.id, []).append(node.lineno)
            elif isinstance(node, ast.Name):
                self._read.setdefault(node.id, []).append(node)
        self._changed = {name for node in nodes_of(function) for name in changed_by(node)}
        self._made = Counter[str]()  # by assignments of what shares its memory with nothing else
        for node in nodes_of(function):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp() | ast.UnaryOp() | ast.Compare()):
                    self._made[name] += 1
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as made):
                    is_new = module.is_of_package(made.func) and last_name(made) in NUMBERS | ROOM | COMPUTE
                    self._made[name] += is_new
                case _:
                    pass
        self._arguments = arguments_of(function) - {"self"}
        self._numbers = set[str]()
        self._staying = self._arguments | self._set.keys() if names is None else set(names) - self._set.keys()
        self._at = 0  # the line of the statement that is looked at, if it is in no block; after that any
        for statement in () if names is None else function.body:
            self._at = statement.lineno
            if not isinstance(statement, ast.Assign) or not self.stays(statement.value):
                continue
            if not names or is_alike(statement.value, names):
                self._add(statement)
        self._at = sys.maxsize

    def _add(self, statement: ast.Assign) -> None:
        """Take the names that a statement gives a value which stays."""
        is_number = self._is_of_numbers(statement.value)
        nodes = [node for target in statement.targets for node in nodes_of(target)]
        for name in [each.id for each in nodes if isinstance(each, ast.Name) and is_set(each)]:
            if len(self._set[name]) == 1 and (is_number or self.is_unchanged(name)):
                self._staying.add(name)
                self._numbers |= {name} if is_number else set()

    def _is_of_numbers(self, value: ast.expr) -> bool:
        """Whether a value that stays is a number, or a shape: nothing can change such an object."""
        calls = {last_name(call) for call in calls_in(value)}
        names = names_in(value)
        if any(isinstance(node, ast.List | ast.ListComp) for node in nodes_of(value)):
            return False
        return calls <= SHAPES | SCALARS | {"len"} and names <= self._arguments | self._numbers | SCALARS | {"len"}

    def is_unchanged(self, name: str) -> bool:
        """Whether nothing changes the object that a name stands for, or gives it another name."""
        reads = self._read.get(name, ())
        return name not in self._changed and all(
            self._module.is_read(node) or self._module.is_returned(node) for node in reads
        )

    def keeps_result(self, statement: ast.stmt) -> bool:
        """Whether a statement only gives its value to names that nothing changes, or returns it."""
        if not isinstance(statement, ast.Assign):
            return isinstance(statement, ast.Return)
        names = names_set(statement)
        is_list = isinstance(statement.value, ast.List | ast.ListComp)  # it may be added to
        return bool(names) and names.isdisjoint(self._changed) and not is_list

    def is_plain(self, statement: ast.stmt) -> bool:
        """Whether a statement is one of a plain sequence: it does the same in every call, and changes nothing."""
        match statement:
            case ast.Expr(value=ast.Constant()):
                return True
            case ast.Return(value=value) if value is not None:
                return self.stays(value)
            case (
                ast.Assign(targets=[ast.Name() as of], value=ast.List() as value)
                | ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name() as of, attr="append"), args=[value]))
            ):
                return self.stays(value) and self._module.is_list_of_read(of)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                return self.stays(value) and (self.is_unchanged(name) or self._is_made_here(name))
            case ast.Assign(targets=[ast.Tuple(elts=parts)], value=value):
                names = [each.id for each in parts if isinstance(each, ast.Name)]
                return self.stays(value) and len(names) == len(parts) and all(map(self.is_unchanged, names))
            case (
                ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=at)], value=value)
                | ast.AugAssign(target=ast.Subscript(value=ast.Name(id=name), slice=at), value=value)
            ):
                return self._is_made_here(name) and self.stays(at) and self.stays(value)
            case ast.For(target=ast.Name(), iter=ast.Call(func=ast.Name(id="range")) as turns, orelse=[]):
                return self.stays(turns) and all(map(self.is_plain, statement.body))
            case ast.If(test=test, body=body, orelse=other):
                return self.stays(test) and all(map(self.is_plain, (*body, *other)))
            case ast.Pass() | ast.Continue() | ast.Break():
                return True
            case _:
                return False

    def _is_made_here(self, name: str) -> bool:
        """Whether all that a name stands for is made by the function itself, so that it may change it."""
        return self._made[name] == len(self._set.get(name, ())) > 0

    def stays(self, node: ast.expr) -> bool:
        """Whether an expression is the same in every call."""
        match node:
            case ast.Constant():
                return True
            case ast.Name(id=name):
                return name in self._staying or name in self._module.numbers
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return name in self._module.buffers(self._of) or self._module.is_declared_number(node, self._of)
            case ast.Attribute(value=value, attr=name):
                if self._module.is_of_package(node) or (name in _WHERE and isinstance(value, ast.Name)):
                    return True
                if self._module.is_declared_number(node, self._of):
                    return True
                return (name in OF_A_TENSOR and self._is_argument(value)) or (
                    name in OF_A_TENSOR | TRANSPOSED and self.stays(value)
                )
            case ast.Call():
                return self._gives_the_same(node)
            case ast.ListComp(elt=each, generators=[ast.comprehension(target=ast.Name(id=name), iter=turns, ifs=[])]):
                return self.stays(turns) and self._stays_with(name, each)
            case _:
                parts = (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))
                return isinstance(node, _OF_PARTS) and all(map(self.stays, parts))

    def _stays_with(self, name: str, node: ast.expr) -> bool:
        """Whether an expression is the same where a name is."""
        known = name in self._staying
        self._staying.add(name)
        stays = self.stays(node)
        self._staying -= set() if known else {name}
        return stays

    def _is_argument(self, node: ast.expr) -> bool:
        """Whether it is an argument of the function, as it was given."""
        if not isinstance(node, ast.Name) or node.id not in self._arguments:
            return False
        return all(line > self._at for line in self._set.get(node.id, ()))

    def _gives_the_same(self, call: ast.Call) -> bool:
        name = last_name(call)
        on = call.func.value if isinstance(call.func, ast.Attribute) else None
        parts = [*call.args, *(each.value for each in call.keywords)]
        if name == "len" and on is None and len(parts) == 1 and self._is_argument(parts[0]):
            return True
        is_of_package = self._module.is_of_package(call.func)
        called = None if is_of_package else self._module.function_of(call, self._of)
        takes_numbers = name in NUMBERS | ROOM if is_of_package else (name, on) == ("range", None)
        of_numbers = set(parts) if takes_numbers else set[ast.expr]()
        if called is not None:
            of_numbers = set(self._module.given_as_numbers(call, called))
        if not is_plain_call(call) or not all(
            self.stays(each) or (each in of_numbers and self._module.is_number(each)) for each in parts
        ):
            return False
        if is_of_package:
            return name in NUMBERS | ROOM | COMPUTE | VIEWS or (isinstance(on, ast.Name) and on.id == "math")
        if called is not None:
            return self._module.gives_the_same(called)
        if isinstance(on, ast.Call) and name in FILLS and last_name(on) in ROOM | COMPUTE:
            return self.stays(on)
        if on is None:
            return name in SCALARS | {"len"}
        return (name in SHAPES and self._is_argument(on)) or (name in COMPUTE | VIEWS | SHAPES and self.stays(on))
