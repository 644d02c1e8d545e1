"""Finds in the source of a program what a function computes anew in every call, although it is always the same.

Only what is certain by the words of the source counts. An expression stays the same if it is made, by functions and
methods that are known to do nothing else, of numbers, of shapes of the arguments, of buffers that `__init__` registers
and that the whole file only reads, and of names that are set once to such an expression and then only read. Functions
of the file are followed where they are a plain sequence of such statements.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from functools import cached_property
from typing import Final

from gpulaunch.profiler.samplers.declared_numbers import DeclaredNumbers
from gpulaunch.profiler.samplers.function_bodies import (
    arguments_of,
    inits_of,
    is_plain_call,
    is_set,
    is_special,
    registered_buffer,
    statements_in,
)
from gpulaunch.profiler.samplers.function_scope import Scope
from gpulaunch.profiler.samplers.layer_inputs import arguments_of_layers, is_of
from gpulaunch.profiler.samplers.loops import Function, calls_in, imported_names, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import names_in, nodes_of
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
    only_computes,
)

_Operation = ast.BinOp | ast.UnaryOp | ast.Compare

_OPAQUE: Final = frozenset(
    {*("_buffers", "__dict__", "buffers", "named_buffers", "get_buffer"), *("setattr", "__setattr__", "vars")}
)
"""Names by which a file may change any buffer."""
_MOST_DEPTH: Final = 6
"""Functions of the file that call each other and are followed."""


def constants_of(tree: ast.Module) -> dict[int, list[range]]:
    """Return the lines of functions on which something is computed that is the same in every call, and for each the
    lines of the functions of the file that compute it, or an empty range for all of a statement.

    Functions of a file without arguments, and those with a loop that calls `backward`, are left out: they run once.

    Args:
        tree: of a file.
    """
    module = Module(tree)
    return _by_line(found for function, of in module.functions for found in module.constants(function, of))


def constants_of_layers(tree: ast.Module) -> dict[int, list[range]]:
    """Return the same for what several layers of a class compute alike in one forward pass, because a model gives all
    of them the same argument: `for layer in self.layers: x = layer(x, edges)`.

    Args:
        tree: of a file.
    """
    module = Module(tree)
    forwards = arguments_of_layers(tree, module.is_read).items()
    return _by_line(found for (function, of), names in forwards for found in module.constants(function, of, names))


def _by_line(statements: Iterable[tuple[ast.stmt, range]]) -> dict[int, list[range]]:
    found: dict[int, list[range]] = {}
    for statement, lines in statements:
        for line in lines_of(statement):
            found.setdefault(line, []).append(lines)
    return found


class Module:
    """What a file says."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = nodes_of(tree)
        self.parents = {child: parent for parent in nodes for child in ast.iter_child_nodes(parent)}
        self.functions: list[tuple[Function, ast.ClassDef | None]] = []
        for each in tree.body:
            if isinstance(each, ast.ClassDef):
                self.functions += [(method, each) for method in each.body if isinstance(method, Function)]
            elif isinstance(each, Function):
                self.functions.append((each, None))
        names = [each for each in nodes if isinstance(each, ast.Name)]
        self._defined = Counter(each.name for each in nodes if isinstance(each, Function | ast.ClassDef))
        self._set = Counter(each.id for each in names if is_set(each))
        self._set.update(each.arg for each in nodes if isinstance(each, ast.arg))
        self.numbers = {name for each in tree.body for name in _numbers_set(each) if self._set[name] == 1}
        """Names of the module that are set once, to a number."""
        self._texts = Counter(each.value for each in nodes if isinstance(each, ast.Constant))
        self._attributes: dict[str, list[ast.Attribute]] = {}
        for node in nodes:
            if isinstance(node, ast.Attribute):
                self._attributes.setdefault(node.attr, []).append(node)
        imported = imported_names(tree).items()
        self._packages = {name for name, of in imported if only_computes(of) and name not in self._set}
        self._defaults = {
            each: {
                name for part in each.body if isinstance(part, ast.Assign | ast.AnnAssign) for name in names_in(part)
            }
            for each in nodes
            if isinstance(each, ast.ClassDef)
        }
        self._is_opaque = not _OPAQUE.isdisjoint({each.id for each in names} | self._attributes.keys())
        self._buffers: dict[ast.ClassDef, set[str]] = {}
        self._lists: dict[tuple[Function, str], bool] = {}
        self._following: list[Function] = []
        self._same: dict[Function, bool] = {}

    def constants(
        self, function: Function, of: ast.ClassDef | None, names: Set[str] = frozenset()
    ) -> Iterator[tuple[ast.stmt, range]]:
        """The statements of a function that compute the same in every call, and the lines of the functions that do.

        `names`: of arguments that are the same, as long as the function does not change them. Then only what depends on
        one of these counts.
        """
        if function.name == "__init__" or not arguments_of(function) or is_special(function):
            return
        scope = Scope(self, function, of, names)
        if not all(map(scope.is_unchanged, names)):
            return
        for statement in statements_in(function.body):
            if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return) and statement.value:
                value = statement.value
                calls = [(call, called) for call in calls_in(value) if (called := self.function_of(call, of))]
                is_own = not names or (not calls and is_of(value, names))
                if is_own and scope.keeps_result(statement) and _computes(value) and scope.stays(value):
                    yield statement, range(0)
                for call, called in calls:
                    if scope.stays(call) and (not names or ("self" not in names_in(called) and is_of(call, names))):
                        yield statement, lines_of(called)

    # -- attributes

    def buffers(self, of: ast.ClassDef | None) -> set[str]:
        """Buffers that `__init__` of a class always registers, and that the file only reads."""
        if of is None or self._is_opaque:
            return set()
        if of not in self._buffers:
            self._buffers[of] = set()  # if one is asked for on the way
            named = {name for init in inits_of(of) for name in map(registered_buffer, init.body) if name}
            self._buffers[of] = {
                name
                for name in named
                if self._texts[name] == 1 and all(map(self.is_read, self._attributes.get(name, ())))
            }
        return self._buffers[of]

    @cached_property  # most files never ask
    def _declared(self) -> DeclaredNumbers:
        return DeclaredNumbers(self._defaults.keys(), self._attributes, self._defined.keys() | self._texts.keys())

    def is_declared_number(self, node: ast.Attribute, of: ast.ClassDef | None) -> bool:
        """Whether an attribute is declared to be a whole number, and set once."""
        return not self._is_opaque and self._declared.has(node, of)

    def is_number(self, node: ast.expr) -> bool:
        """Whether it is an attribute that only `__init__` sets, once, or is computed of such: where a number is needed,
        it is no parameter."""
        match node:
            case ast.Constant():
                return True
            case ast.BinOp(left=left, right=right):
                return self.is_number(left) and self.is_number(right)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                stores = [each for each in self._attributes[name] if is_set(each)]
                of = self._class_of(node)
                is_default = of is not None and name in self._defaults[of]
                if self._is_opaque or is_default or len(stores) != 1 or not self._is_in_init(stores[0]):
                    return False
                return not any(self._is_object(each) for each in self._attributes[name])
            case _:
                return False

    def _is_object(self, node: ast.Attribute) -> bool:
        """Whether something is made a part of, or done with, what an attribute is, as no program does with a number."""
        parent = self.parents[node]
        if isinstance(parent, ast.Attribute) or (isinstance(parent, ast.Subscript) and parent.value is node):
            return True
        value = parent.value if isinstance(parent, ast.Assign) and is_set(node) else None
        return isinstance(value, ast.Call) and last_name(value) not in SCALARS | {"len"}

    def _is_in_init(self, node: ast.AST) -> bool:
        function = self._function_around(node)
        return function is not None and function.name == "__init__"

    # -- what is done with a tensor

    def is_read(self, node: ast.expr) -> bool:
        """Whether the place at which a tensor is used neither changes it nor gives it another name."""
        parent = self.parents[node]
        if isinstance(parent, ast.keyword):
            parent = self.parents[parent]
        match parent:
            case ast.BinOp() | ast.UnaryOp() | ast.Compare() | ast.Slice():
                return True
            case ast.Subscript(value=value, ctx=ast.Load()):
                return value is not node or self.is_read(parent)
            case ast.Tuple() | ast.List():
                match self.parents[parent]:
                    case ast.Assign(targets=[ast.Name() as name]):
                        return isinstance(parent, ast.List) and self.is_list_of_read(name)
                    case ast.Subscript(slice=index):
                        return index is parent
                    case ast.Call(func=function) as given:
                        return self.is_of_package(function) and self._reads(given)
                    case _:
                        return False
            case ast.Attribute(attr=name, ctx=ast.Load()):
                call = self.parents[parent]
                if isinstance(call, ast.Call) and call.func is parent:
                    return name in SHAPES or self._reads(call)
                return name in OF_A_TENSOR or (name in TRANSPOSED and self.is_read(parent))
            case ast.Call(func=ast.Name(id="len" | "range")):
                return True
            case ast.Call(func=ast.Attribute(value=ast.Name() as name, attr="append")) if node in parent.args:
                return self.is_list_of_read(name)
            case ast.Call(func=function) if function is not node and self.is_of_package(function):
                return self._reads(parent)
            case ast.Call(func=ast.Attribute(value=ast.Call() as made, attr=name)) if name in FILLS | COMPUTE | VIEWS:
                return made is not node and self._is_of_package_call(made)
            case ast.Call(func=function) if function is not node:
                called = self.function_of(parent, self._class_of(parent))
                if called is None or not self.gives_the_same(called):
                    return False
                return self._gives_new(called) or self.is_read(parent)
            case _:
                return False

    def is_list_of_read(self, name: ast.Name) -> bool:
        """Whether a name of a function stands for one list, to which it only adds, and whose elements it only reads."""
        function = self._function_around(name)
        if function is None:
            return False
        if (function, name.id) not in self._lists:
            self._lists[function, name.id] = False  # if it is asked for on the way: it is given an element of its own
            uses = [node for node in nodes_of(function) if isinstance(node, ast.Name) and node.id == name.id]
            made = [self.parents[node] for node in uses if is_set(node)]
            self._lists[function, name.id] = (
                len(made) == 1
                and isinstance(made[0], ast.Assign)
                and isinstance(made[0].value, ast.List)
                and all(is_set(node) or self._is_read_or_added_to(node) for node in uses)
            )
        return self._lists[function, name.id]

    def _is_read_or_added_to(self, node: ast.Name) -> bool:
        match parent := self.parents[node]:
            case ast.Subscript(value=value, ctx=ast.Load()) if value is node:
                return self.is_read(parent)
            case ast.Attribute(attr="append"):
                return isinstance(self.parents[parent], ast.Call)
            case ast.Call(func=function) if self.is_of_package(function):
                return last_name(parent) in COMPUTE and is_plain_call(parent)
            case _:
                return False

    def is_returned(self, node: ast.expr) -> bool:
        """Whether it, or a part of it, is what a function returns, or one of several that it does."""
        parent = self.parents[node]
        while isinstance(parent, ast.Tuple) or (isinstance(parent, ast.Subscript) and parent.value is node):
            node, parent = parent, self.parents[parent]
        return isinstance(parent, ast.Return)

    def _reads(self, call: ast.Call) -> bool:
        name = last_name(call)
        is_new = name in COMPUTE | NUMBERS | ROOM
        return is_plain_call(call) and (is_new or (name in VIEWS and self.is_read(call)))

    def _gives_new(self, function: Function) -> bool:
        """Whether what a function returns shares its memory with no argument."""
        returned = [each.value for each in statements_in(function.body) if isinstance(each, ast.Return)]
        parts = [part for each in returned for part in (each.elts if isinstance(each, ast.Tuple) else [each])]
        arguments = arguments_of(function)
        return all(
            isinstance(each, _Operation)
            or (isinstance(each, ast.Call) and last_name(each) in COMPUTE)
            or (isinstance(each, ast.Name | ast.Subscript) and arguments.isdisjoint(names_in(each)))
            for each in parts
        )

    # -- functions

    def _function_around(self, node: ast.AST) -> Function | None:
        at: ast.AST | None = node
        while at is not None and not isinstance(at, Function):
            at = self.parents.get(at)
        return at

    def _class_of(self, node: ast.AST) -> ast.ClassDef | None:
        at: ast.AST | None = node
        while at is not None and not isinstance(at, ast.ClassDef):
            at = self.parents.get(at)
        return at

    def is_of_package(self, node: ast.expr) -> bool:
        """Whether it is one of the packages, or what it has: `torch.nn.functional.pad`."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._packages

    def _is_of_package_call(self, call: ast.Call) -> bool:
        """Whether it is a call of a package's function, or of methods of its result."""
        function: ast.expr = call.func
        while isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call):
            function = function.value.func
        return self.is_of_package(function)

    def function_of(self, call: ast.Call, of: ast.ClassDef | None) -> Function | None:
        """The function of the module, or method of a class of it, that is called, if the file has no other of its
        name."""
        match call.func:
            case ast.Name(id=name):
                within, is_changed = None, name in self._set
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if of is not None:
                within, is_changed = of, any(map(is_set, self._attributes[name]))
            case _:
                return None
        if self._defined[name] != 1 or is_changed:
            return None
        return next((each for each, its in self.functions if each.name == name and its is within), None)

    def given_as_numbers(self, call: ast.Call, function: Function) -> Iterator[ast.expr]:
        """The arguments of a call of a function of the file that are numbers, as it makes a range or a tensor of so
        many elements of them."""
        makes = (each for each in calls_in(function) if last_name(each) == "range" or self._makes_of_numbers(each))
        numbers = {name for each in makes for part in each.args for name in _terms(part)}
        given: list[tuple[str | None, ast.expr]] = [(each.arg, each.value) for each in call.keywords]
        names = [each.arg for each in function.args.args if each.arg != "self"]
        yield from (value for name, value in (*zip(names, call.args, strict=False), *given) if name in numbers)

    def _makes_of_numbers(self, call: ast.Call) -> bool:
        return last_name(call) in NUMBERS | ROOM and self.is_of_package(call.func)

    def gives_the_same(self, function: Function) -> bool:
        """Whether a function gives the same in every call with the same arguments, changes none, and is a plain
        sequence of statements."""
        if function in self._following or len(self._following) >= _MOST_DEPTH:
            return False
        if function not in self._same:
            of = next(its for each, its in self.functions if each is function)
            self._following.append(function)
            scope = Scope(self, function, of, None)
            self._same[function] = (
                all(isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list)
                and all(map(scope.is_plain, function.body))
                and all(map(scope.is_unchanged, arguments_of(function) - {"self"}))
            )
            self._following.pop()
        return self._same[function]


def _terms(node: ast.expr) -> Iterator[str]:
    """The names that are terms of a sum or a product."""
    match node:
        case ast.Name(id=name):
            yield name
        case ast.BinOp(left=left, right=right):
            yield from (*_terms(left), *_terms(right))
        case _:
            pass


def _numbers_set(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant()):
            yield name
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            pairs = zip(targets, values, strict=False)
            yield from (to.id for to, each in pairs if isinstance(to, ast.Name) and isinstance(each, ast.Constant))
        case _:
            pass


def _computes(value: ast.expr) -> bool:
    """Whether an expression does more than count things, make room, and name parts of it."""
    cheap = ROOM | SHAPES | SCALARS | VIEWS | {"len"}
    return any(last_name(call) not in cheap for call in calls_in(value)) or any(
        isinstance(node, ast.MatMult) for node in nodes_of(value)
    )
