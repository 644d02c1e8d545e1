"""Finds in the source of a program what a function computes anew in every call, although it is always the same.

Such a statement, or call of a function, uses nothing but what stays: numbers, shapes of the arguments, names that the
module sets once, attributes that only `__init__` sets and that are neither parameters nor modules, and what others of
these statements have given. The words of the source decide; where they leave a doubt, it is left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from typing import Final

from gpulaunch.profiler.samplers.loops import calls_in, last_name, lines_of
from gpulaunch.profiler.samplers.source_names import (
    Function,
    arguments_of,
    names_changed,
    names_filled,
    names_imported,
    names_set,
    scalar_arguments,
    statements,
    value_of,
)

_PACKAGES: Final = frozenset({"torch", "numpy", "math", "scipy"})
"""Their functions give the same for the same arguments, but for those below."""
_VARIES: Final = re.compile(
    r".*(?:rand|rng|dropout|bernoulli|multinomial|poisson|sample|shuffle|permut|choice|seed|state|grad|load|open|read"
    r"|current|compile|script|checkpoint|parameters).*|(?:.*_)?(?:normal|uniform)|[A-Z].*|get_.*|is_.*|.*_"
)
"""Functions that draw random numbers, read what may have changed, or change something; and classes."""
_BLANK: Final = frozenset({"zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like"})
"""Functions that make room, which the program then fills."""
_OF_NUMBERS: Final = frozenset(
    {"arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices", "zeros", "ones", "full", "range"}
)
"""Functions that are given no parameters and no modules, but numbers."""
_OF_A_TENSOR: Final = frozenset({"shape", "device", "dtype", "ndim"})
"""Attributes that its values have no part in."""
_SHAPES: Final = frozenset({"size", "dim", "numel", "len", "isinstance"})
"""Functions and methods that give such."""
_VIEWS: Final = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_BUILTINS: Final = frozenset({"int", "float", "bool", "range", "min", "max", "abs", "round", "sum", "tuple", "list"})
_BACKWARD: Final = frozenset({"backward", "manual_backward"})
_MOST_DEPTH: Final = 6
"""Functions of the file that call each other and are followed."""
_OF_PARTS: Final = (
    *(ast.BinOp, ast.Compare, ast.UnaryOp, ast.BoolOp, ast.Tuple, ast.List, ast.Subscript, ast.Slice, ast.Starred),
)
"""Expressions that are the same if their parts are."""


ALL: Final = ""
"""Instead of the name of a function: all of a statement."""


def constants_of(tree: ast.Module) -> dict[int, set[str]]:
    """Return the lines of functions on which something is computed that is the same in every call, and which functions
    of the file give it, or `ALL`.

    Functions without arguments, and those with a loop that calls `backward`, are left out: they run once.

    Args:
        tree: of a file.
    """
    module = _Module(tree)
    found: dict[int, set[str]] = {}
    for function, of in module.functions():
        for line, name in module.constants(function, of):
            found.setdefault(line, set()).add(name)
    return found


class _Module:
    """What a file says."""

    def __init__(self, tree: ast.Module) -> None:
        self._top = {each.name: each for each in tree.body if isinstance(each, Function | ast.ClassDef)}
        self._packages = {name for name, package in names_imported(tree) if package in _PACKAGES}
        self._changed = frozenset(names_changed(tree))
        self._following: list[Function] = []
        self._same: dict[Function, bool] = {}
        self._attributes: dict[ast.ClassDef, tuple[Set[str], Set[str]]] = {}
        sets = [(name, statement) for statement in statements(tree.body) for name in names_set(statement)]
        times = [name for name, _ in sets]
        self._globals: set[str] = set()
        for name, statement in sets:
            value = value_of(statement)
            is_set_once = statement in tree.body and times.count(name) == 1 and name not in self._changed
            if is_set_once and value is not None and self._is_made_of(value, self._globals):
                self._globals.add(name)

    def functions(self) -> Iterator[tuple[Function, ast.ClassDef | None]]:
        """All functions of the module and methods of its classes, with their class."""
        for each in self._top.values():
            if isinstance(each, ast.ClassDef):
                yield from ((method, each) for method in each.body if isinstance(method, Function))
            else:
                yield each, None

    def constants(self, function: Function, of: ast.ClassDef | None) -> Iterator[tuple[int, str]]:
        """The lines of a function on which it computes the same in every call, and by which functions."""
        arguments = {each.arg for each in arguments_of(function)}
        if arguments <= {"self"} or function.name == "__init__" or _is_special(function):
            return
        body = _Body(self, function, of, arguments)
        for statement in statements(function.body):
            value = value_of(statement)
            if value is not None and _gives_only(statement) and _computes(value) and body.stays(value):
                yield from ((line, ALL) for line in lines_of(statement))
            for call in () if value is None else calls_in(value):
                if self._function(call.func, of) is not None and body.stays(call):
                    yield from ((line, last_name(call)) for line in lines_of(statement))

    def attributes(self, of: ast.ClassDef | None) -> tuple[Set[str], Set[str]]:
        """Attributes of `self` that stay, and those that stay if they are numbers."""
        if of is None:
            return set(), set()
        if of not in self._attributes:
            found = [each for method in self._inits(of) for each in self._set_by(method)]
            unsure = {name for name, is_sure in found if not is_sure} - self._changed
            self._attributes[of] = {name for name, _ in found} - unsure - self._changed, unsure
        return self._attributes[of]

    def _inits(self, of: ast.ClassDef) -> list[ast.FunctionDef]:
        """`__init__` of a class, and of the classes of the module that it is derived from."""
        classes = [of]
        for each in classes:
            above = [self._top.get(base.id) for base in each.bases if isinstance(base, ast.Name)]
            classes += [base for base in above if isinstance(base, ast.ClassDef) and base not in classes]
        methods = [method for each in classes for method in each.body if isinstance(method, ast.FunctionDef)]
        return [method for method in methods if method.name == "__init__"]

    def _set_by(self, method: ast.FunctionDef) -> Iterator[tuple[str, bool]]:
        """Attributes that `__init__` sets, and whether they surely are no parameters and no modules."""
        scalars = scalar_arguments(method)
        known = {name for each in statements(method.body) for name in names_set(each)}
        known = scalars | known.difference(each.arg for each in arguments_of(method))
        for node in ast.walk(method):
            match node:
                case ast.Call(func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(value=str(name)), *_]):
                    yield name, True
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=ast.Name(id=of)):
                    yield name, of in scalars
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
                    if self._is_made_of(value, known):
                        yield name, True
                case _:
                    pass

    def _is_made_of(self, value: ast.expr, names: Set[str]) -> bool:
        """Whether a value is made of numbers by functions that give no parameter and no module."""
        for node in ast.walk(value):
            if isinstance(node, ast.Call) and not self._is_known(node) and last_name(node) not in _BUILTINS:
                return False
            if isinstance(node, ast.keyword) and node.arg == "requires_grad":
                return False
            if isinstance(node, ast.Name) and node.id not in names | self._packages | _BUILTINS:
                return False
        return True

    def _is_known(self, call: ast.Call) -> bool:
        """Whether it is a function of one of the packages, or a method, that gives the same for the same arguments."""
        return isinstance(call.func, ast.Attribute) and not _VARIES.fullmatch(last_name(call))

    def is_fixed(self, name: str) -> bool:
        """Whether a name of the module stays: a package, or what it sets once."""
        return name in self._packages or name in self._globals

    def is_package(self, node: ast.expr) -> bool:
        """Whether it is one of the packages, or what it has: `torch.nn.functional`, `torch.no_grad()`."""
        while isinstance(node, ast.Attribute | ast.Call):
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id in self._packages

    def gives_the_same(self, called: ast.expr, of: ast.ClassDef | None) -> bool:
        """Whether a function of the file gives the same in every call with the same arguments."""
        function = self._function(called, of)
        if function is None or function in self._following or len(self._following) >= _MOST_DEPTH:
            return False
        if function not in self._same:
            self._following.append(function)
            body = _Body(self, function, of, set())
            self._same[function] = not _is_special(function) and all(map(body.is_the_same, statements(function.body)))
            self._following.pop()
        return self._same[function]

    def _function(self, called: ast.expr, of: ast.ClassDef | None) -> Function | None:
        """The function of the module, or method of a class of it, that is called."""
        match called:
            case ast.Name(id=name):
                among: list[ast.stmt] = [*self._top.values()]
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if of is not None:
                among = of.body
            case _:
                return None
        return next((each for each in among if isinstance(each, Function) and each.name == name), None)


class _Body:
    """Which names of a function vary: its arguments, and all that is made of what varies."""

    def __init__(self, module: _Module, function: Function, of: ast.ClassDef | None, varying: Set[str]) -> None:
        """`varying`: its arguments, if they are not taken to stay."""
        self._module = module
        self._of = of
        self._sure, self._unsure = module.attributes(of)
        self._varying = {*varying, "self"}
        parts = list(statements(function.body))
        self._made = {name for each in parts for name in names_set(each)}
        self._local = self._made.union(each.arg for each in arguments_of(function))
        while new := {name for each in parts for name in self._made_varying(each)} - self._varying:
            self._varying |= new

    def _made_varying(self, statement: ast.stmt) -> Iterator[str]:
        value = statement.iter if isinstance(statement, ast.For) else value_of(statement)
        if value is None or not self.stays(value):
            yield from names_set(statement)
        for name, method, values in names_filled(statement):
            if _VARIES.fullmatch(method.removesuffix("_")) or not all(map(self.stays, values)):
                yield name

    def is_the_same(self, statement: ast.stmt) -> bool:
        """Whether a statement of the function does the same in every call, and changes nothing outside of it."""
        filled = [name for name, _, _ in names_filled(statement)]
        if filled:
            return all(name in self._made and name not in self._varying for name in filled)
        match statement:
            case ast.Pass() | ast.Break() | ast.Continue() | ast.Raise() | ast.Return(value=None):
                return True
            case ast.If(test=value) | ast.While(test=value) | ast.For(iter=value) | ast.Expr(value=value):
                return self.stays(value)
            case ast.With(items=items):
                return all(self._module.is_package(item.context_expr) for item in items)
            case _:
                given = value_of(statement)
                is_local = any(names_set(statement)) or isinstance(statement, ast.Return)
                return is_local and given is not None and self.stays(given)

    def stays(self, node: ast.expr) -> bool:
        """Whether an expression is the same in every call."""
        match node:
            case ast.Constant():
                return True
            case ast.Name(id=name):
                return name not in self._varying if name in self._local else self._module.is_fixed(name)
            case ast.Attribute(value=value, attr=name):
                if name in _OF_A_TENSOR and not any(calls_in(value)):
                    return True
                if isinstance(value, ast.Name) and value.id == "self":
                    return name in self._sure
                return (name in _VIEWS or self._module.is_package(value)) and self.stays(value)
            case ast.Call():
                return self._gives_the_same(node)
            case ast.IfExp(body=body, orelse=other):
                return self.stays(body) and self.stays(other)
            case _:
                return isinstance(node, _OF_PARTS) and all(map(self.stays, _parts(node)))

    def _gives_the_same(self, call: ast.Call) -> bool:
        name = last_name(call)
        parts = [*call.args, *(each.value for each in call.keywords)]
        on = call.func.value if isinstance(call.func, ast.Attribute) else None
        if name in _SHAPES and not any(inner is not call for inner in calls_in(call)):
            return True
        numbers = self._unsure if name in _OF_NUMBERS else set()
        if not all(self.stays(part) or _attribute(part) in numbers for part in parts):
            return False
        if self._module.gives_the_same(call.func, self._of):
            return True
        if _VARIES.fullmatch(name) or any(each.arg in ("generator", "requires_grad") for each in call.keywords):
            return False
        return self.stays(on) if on else name in _BUILTINS


def _is_special(function: Function) -> bool:
    """Whether what a function does may not be all that its statements say: a generator, or one that trains."""
    kinds = ast.Yield | ast.YieldFrom | ast.Await | ast.Global | ast.Nonlocal
    if isinstance(function, ast.AsyncFunctionDef) or any(isinstance(node, kinds) for node in ast.walk(function)):
        return True
    loops = (node for node in ast.walk(function) if isinstance(node, ast.For | ast.While))
    return any(last_name(call) in _BACKWARD for loop in loops for call in calls_in(loop))


def _gives_only(statement: ast.stmt) -> bool:
    """Whether a statement does no more with its value than give it to names, or return it."""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return all(isinstance(each, ast.Name | ast.Tuple | ast.Attribute) for each in targets)
    return isinstance(statement, ast.Return)


def _computes(value: ast.expr) -> bool:
    """Whether an expression does more than count things and make room."""
    return any(last_name(call) not in _BLANK | _SHAPES | _BUILTINS for call in calls_in(value)) or any(
        isinstance(node, ast.MatMult) for node in ast.walk(value)
    )


def _parts(node: ast.expr) -> list[ast.expr]:
    return [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]


def _attribute(node: ast.expr) -> str:
    """`heads` of `self.heads`."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
        case _:
            return ""
