"""Finds in the source of a program what a function computes anew in every call, although it is always the same.

Only what is certain by the words of the source counts. An expression stays the same if it is made, by functions and
methods that are known to do nothing else, of numbers, of shapes of the arguments, of buffers that `__init__` registers
and that the whole file only reads, and of names that are set once to such an expression and then only read. Functions
of the file are followed where they are a plain sequence of such statements.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from gpulaunch.profiler.samplers.loops import BACKWARD, Function, calls_in, imported_names, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import names_in, nodes_of, root_of
from gpulaunch.profiler.samplers.tensor_functions import COMPUTE, NUMBERS, ROOM, SCALARS, SHAPES, VIEWS, only_computes

_Operation = ast.BinOp | ast.UnaryOp | ast.Compare

_OF_A_TENSOR: Final = frozenset({"shape", "device", "dtype", "ndim"})
"""Attributes that its values have no part in."""
_WHERE: Final = frozenset({"device", "dtype"})
"""Those that do not change at all."""
_TRANSPOSED: Final = frozenset({"T", "mT"})
_REFUSED: Final = frozenset({"out", "generator", "requires_grad"})
"""Arguments with which a function does something else."""
_SHARES: Final = frozenset({"data", "detach"})
"""What gives a buffer the memory of a parameter."""
_OPAQUE: Final = frozenset({*("_buffers", "__dict__", "buffers", "named_buffers", "get_buffer"), *("setattr", "vars")})
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
    module = _Module(tree)
    found: dict[int, list[range]] = {}
    for function, of in module.functions:
        for statement, lines in module.constants(function, of):
            for line in lines_of(statement):
                found.setdefault(line, []).append(lines)
    return found


class _Module:
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
        self._set = {each.id for each in names if _is_set(each)} | {
            each.arg for each in nodes if isinstance(each, ast.arg)
        }
        self._texts = Counter(each.value for each in nodes if isinstance(each, ast.Constant))
        self._attributes: dict[str, list[ast.Attribute]] = {}
        for node in nodes:
            if isinstance(node, ast.Attribute):
                self._attributes.setdefault(node.attr, []).append(node)
        imported = imported_names(tree).items()
        self._packages = {name for name, of in imported if only_computes(of)} - self._set
        bodies = [each.body for each in nodes if isinstance(each, ast.ClassDef)]
        of_classes = [each for body in bodies for each in body if isinstance(each, ast.Assign | ast.AnnAssign)]
        self._defaults = {name for each in of_classes for name in names_in(each)}
        self._is_opaque = not _OPAQUE.isdisjoint({each.id for each in names} | self._attributes.keys())
        self._buffers: dict[ast.ClassDef, set[str]] = {}
        self._following: list[Function] = []
        self._same: dict[Function, bool] = {}

    def constants(self, function: Function, of: ast.ClassDef | None) -> Iterator[tuple[ast.stmt, range]]:
        """The statements of a function that compute the same in every call, and the lines of the functions that do."""
        if function.name == "__init__" or not _arguments(function) or _is_special(function):
            return
        scope = _Scope(self, function, of)
        for statement in _statements(function.body):
            if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return) and statement.value:
                if scope.keeps_result(statement) and _computes(statement.value) and scope.stays(statement.value):
                    yield statement, range(0)
                for call in calls_in(statement.value):
                    called = self.function_of(call, of)
                    if called is not None and scope.stays(call):
                        yield statement, lines_of(called)

    # -- attributes

    def buffers(self, of: ast.ClassDef | None) -> set[str]:
        """Buffers that `__init__` of a class always registers, and that the file only reads."""
        if of is None or self._is_opaque:
            return set()
        if of not in self._buffers:
            self._buffers[of] = set()  # if one is asked for on the way
            inits = [each for each in of.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            named = {name for init in inits for name in map(_registered, init.body) if name}
            self._buffers[of] = {
                name
                for name in named
                if self._texts[name] == 1 and all(map(self.is_read, self._attributes.get(name, ())))
            }
        return self._buffers[of]

    def is_number(self, node: ast.expr) -> bool:
        """Whether it is an attribute that only `__init__` sets, once: where a number is needed, it is no parameter."""
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                stores = [each for each in self._attributes[name] if _is_set(each)]
                if self._is_opaque or name in self._defaults or len(stores) != 1 or not self._is_in_init(stores[0]):
                    return False
                return not any(self._is_object(each) for each in self._attributes[name])
            case _:
                return False

    def _is_object(self, node: ast.Attribute) -> bool:
        """Whether something is made a part of, or done with, what an attribute is, as no program does with a number."""
        parent = self.parents[node]
        if isinstance(parent, ast.Attribute) or (isinstance(parent, ast.Subscript) and parent.value is node):
            return True
        value = parent.value if isinstance(parent, ast.Assign) and _is_set(node) else None
        return isinstance(value, ast.Call) and last_name(value) not in SCALARS | {"len"}

    def _is_in_init(self, node: ast.AST) -> bool:
        at: ast.AST | None = node
        while at is not None and not isinstance(at, Function):
            at = self.parents.get(at)
        return at is not None and at.name == "__init__"

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
            case ast.Tuple():
                return isinstance(index := self.parents[parent], ast.Subscript) and index.slice is parent
            case ast.Attribute(attr=name, ctx=ast.Load()):
                call = self.parents[parent]
                if isinstance(call, ast.Call) and call.func is parent:
                    return name in SHAPES or self._reads(call)
                return name in _OF_A_TENSOR or (name in _TRANSPOSED and self.is_read(parent))
            case ast.Call(func=ast.Name(id="len")):
                return True
            case ast.Call(func=function) if function is not node and self.is_of_package(function):
                return self._reads(parent)
            case ast.Call(func=function) if function is not node:
                called = self.function_of(parent, self._class_of(parent))
                if called is None or not self.gives_the_same(called):
                    return False
                return self._gives_new(called) or self.is_read(parent)
            case _:
                return False

    def _reads(self, call: ast.Call) -> bool:
        name = last_name(call)
        is_new = name in COMPUTE | NUMBERS | ROOM
        return _is_plain(call) and (is_new or (name in VIEWS and self.is_read(call)))

    def _gives_new(self, function: Function) -> bool:
        """Whether what a function returns shares its memory with no argument."""
        returned = [each.value for each in _statements(function.body) if isinstance(each, ast.Return)]
        return all(
            isinstance(each, _Operation) or (isinstance(each, ast.Call) and last_name(each) in COMPUTE)
            for each in returned
        )

    # -- functions

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

    def function_of(self, call: ast.Call, of: ast.ClassDef | None) -> Function | None:
        """The function of the module, or method of a class of it, that is called, if the file has no other of its
        name."""
        match call.func:
            case ast.Name(id=name):
                within, is_set = None, name in self._set
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if of is not None:
                within, is_set = of, any(map(_is_set, self._attributes[name]))
            case _:
                return None
        if self._defined[name] != 1 or is_set:
            return None
        return next((each for each, its in self.functions if each.name == name and its is within), None)

    def gives_the_same(self, function: Function) -> bool:
        """Whether a function gives the same in every call with the same arguments, changes none, and is a plain
        sequence of statements."""
        if function in self._following or len(self._following) >= _MOST_DEPTH:
            return False
        if function not in self._same:
            of = next(its for each, its in self.functions if each is function)
            self._following.append(function)
            scope = _Scope(self, function, of, arguments_stay=True)
            self._same[function] = (
                not function.decorator_list
                and all(map(scope.is_plain, function.body))
                and all(map(scope.is_unchanged, _arguments(function) - {"self"}))
            )
            self._following.pop()
        return self._same[function]


class _Scope:
    """Which names of a function stay the same."""

    def __init__(
        self, module: _Module, function: Function, of: ast.ClassDef | None, *, arguments_stay: bool = False
    ) -> None:
        """`arguments_stay`: they are taken to be the same in every call."""
        self._module = module
        self._of = of
        self._set: dict[str, list[int]] = {}
        self._read: dict[str, list[ast.Name]] = {}
        for node in nodes_of(function):
            if isinstance(node, ast.Name) and _is_set(node):
                self._set.setdefault(node.id, []).append(node.lineno)
            elif isinstance(node, ast.Name):
                self._read.setdefault(node.id, []).append(node)
        self._changed = {name for node in nodes_of(function) for name in changed_by(node)}
        self._arguments = _arguments(function) - {"self"}
        self._numbers = set[str]()
        self._staying = self._arguments | self._set.keys() if arguments_stay else set[str]()
        self._at = 0  # the line of the statement that is looked at, if it is in no block; after that any
        for statement in () if arguments_stay else function.body:
            self._at = statement.lineno
            if isinstance(statement, ast.Assign) and self.stays(statement.value):
                self._add(statement)
        self._at = sys.maxsize

    def _add(self, statement: ast.Assign) -> None:
        """Take the names that a statement gives a value which stays."""
        is_number = self._is_of_numbers(statement.value)
        nodes = [node for target in statement.targets for node in nodes_of(target)]
        for name in [each.id for each in nodes if isinstance(each, ast.Name) and _is_set(each)]:
            if len(self._set[name]) == 1 and (is_number or self.is_unchanged(name)):
                self._staying.add(name)
                self._numbers |= {name} if is_number else set()

    def _is_of_numbers(self, value: ast.expr) -> bool:
        """Whether a value that stays is a number, or a shape: nothing can change such an object."""
        calls = {last_name(call) for call in calls_in(value)}
        names = names_in(value)
        if any(isinstance(node, ast.List) for node in nodes_of(value)):
            return False
        return calls <= SHAPES | SCALARS | {"len"} and names <= self._arguments | self._numbers | SCALARS | {"len"}

    def is_unchanged(self, name: str) -> bool:
        """Whether nothing changes the object that a name stands for, or gives it another name."""
        reads = self._read.get(name, ())
        return name not in self._changed and all(
            self._module.is_read(node) or isinstance(self._module.parents[node], ast.Return) for node in reads
        )

    def keeps_result(self, statement: ast.stmt) -> bool:
        """Whether a statement only gives its value to names that nothing changes, or returns it."""
        if not isinstance(statement, ast.Assign):
            return isinstance(statement, ast.Return)
        targets = [each for to in statement.targets for each in (to.elts if isinstance(to, ast.Tuple) else [to])]
        return all(isinstance(each, ast.Name) and each.id not in self._changed for each in targets)

    def is_plain(self, statement: ast.stmt) -> bool:
        """Whether a statement is one of a plain sequence: it does the same in every call, and changes nothing."""
        match statement:
            case ast.Expr(value=ast.Constant()):
                return True
            case ast.Return(value=value) if value is not None:
                return self.stays(value)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                return self.stays(value) and self.is_unchanged(name)
            case _:
                return False

    def stays(self, node: ast.expr) -> bool:
        """Whether an expression is the same in every call."""
        match node:
            case ast.Constant():
                return True
            case ast.Name(id=name):
                return name in self._staying
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return name in self._module.buffers(self._of)
            case ast.Attribute(value=value, attr=name):
                if self._module.is_of_package(node) or (name in _WHERE and isinstance(value, ast.Name)):
                    return True
                return (name in _OF_A_TENSOR and self._is_argument(value)) or (
                    name in _OF_A_TENSOR | _TRANSPOSED and self.stays(value)
                )
            case ast.Call():
                return self._gives_the_same(node)
            case ast.BinOp() | ast.UnaryOp() | ast.Compare() | ast.Tuple() | ast.List() | ast.Subscript() | ast.Slice():
                return all(self.stays(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))
            case _:
                return False

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
        takes_numbers = is_of_package and name in NUMBERS | ROOM
        if not _is_plain(call) or not all(
            self.stays(each) or (takes_numbers and self._module.is_number(each)) for each in parts
        ):
            return False
        if is_of_package:
            return name in NUMBERS | ROOM | COMPUTE | VIEWS or (isinstance(on, ast.Name) and on.id == "math")
        called = self._module.function_of(call, self._of)
        if called is not None:
            return self._module.gives_the_same(called)
        if on is None:
            return name in SCALARS | {"len"}
        return (name in SHAPES and self._is_argument(on)) or (name in COMPUTE | VIEWS | SHAPES and self.stays(on))


def _registered(statement: ast.stmt) -> str:
    """The buffer that a statement registers, if it has memory of its own."""
    match statement:
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(value=str(name)), value, *_])
        ):
            shares = any(isinstance(node, ast.Attribute) and node.attr in _SHARES for node in nodes_of(value))
            return "" if shares else name
        case _:
            return ""


def changed_by(node: ast.AST) -> Iterator[str]:
    """Names of objects that a part of a function changes: `mask[0] = 1`, `mask.tril_()`, `out=mask`, `mask += 1`."""
    match node:
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()) | ast.Attribute(value=value, ctx=ast.Store()):
            yield root_of(value)
        case ast.Call(func=ast.Attribute(value=value, attr=method), args=args) if method.endswith("_"):
            yield from map(root_of, (value, *args))
        case ast.keyword(arg="out", value=value) | ast.AugAssign(target=value):
            yield root_of(value)
        case _:
            pass


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """All statements of a body and of the blocks in it; not those of functions and classes in it."""
    for part in body:
        if isinstance(part, Function | ast.ClassDef):
            continue
        if isinstance(part, ast.stmt):
            yield part
        blocks = (ast.stmt, ast.ExceptHandler, ast.match_case)
        yield from _statements(each for each in ast.iter_child_nodes(part) if isinstance(each, blocks))


def _arguments(function: Function) -> set[str]:
    return {node.arg for node in nodes_of(function.args) if isinstance(node, ast.arg)}


def _is_special(function: Function) -> bool:
    """Whether what a function does may not be all that its statements say: a generator, or one that trains."""
    kinds = ast.Yield | ast.YieldFrom | ast.Await | ast.Global | ast.Nonlocal
    if isinstance(function, ast.AsyncFunctionDef) or any(isinstance(node, kinds) for node in nodes_of(function)):
        return True
    loops = (node for node in nodes_of(function) if isinstance(node, ast.For | ast.While))
    return any(last_name(call) in BACKWARD for loop in loops for call in calls_in(loop))


def _is_plain(call: ast.Call) -> bool:
    """Whether a call has none of the arguments with which a function does something else."""
    return all(each.arg is not None and each.arg not in _REFUSED for each in call.keywords)


def _computes(value: ast.expr) -> bool:
    """Whether an expression does more than count things, make room, and name parts of it."""
    cheap = ROOM | SHAPES | SCALARS | VIEWS | {"len"}
    return any(last_name(call) not in cheap for call in calls_in(value)) or any(
        isinstance(node, ast.MatMult) for node in nodes_of(value)
    )


def _is_set(node: ast.Name | ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Load)
