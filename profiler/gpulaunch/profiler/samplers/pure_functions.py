"""Finds in the source of a program functions that only compute with the tensors and numbers that they are given.

They keep to what is known by name: operations and methods of tensors, functions of `torch`, `numpy` and `math`, and
other such functions of the file. They change none of their arguments, and nothing outside of them.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Final

from gpulaunch.profiler.samplers.loops import Function, imported_names, last_name
from gpulaunch.profiler.samplers.syntax import nodes_of, root_of
from gpulaunch.profiler.samplers.tensor_functions import COMPUTE, NUMBERS, ROOM, SCALARS, SHAPES, VIEWS, only_computes

_METHODS: Final = frozenset(
    {
        *COMPUTE,
        *VIEWS,
        *SHAPES,
        *ROOM,
        *NUMBERS,
        *(
            "index_add",
            "index_copy",
            "index_fill",
            "scatter",
            "scatter_add",
            "fill",
            "fill_diagonal",
            "indices",
            "values",
        ),
        *("any", "all", "max", "min", "argmax", "argmin", "topk", "unique", "item", "tolist", "detach", "is_sparse"),
        *("new_zeros", "new_ones", "new_full", "shape", "device", "dtype", "ndim", "T", "mT", "log_prob", "entropy"),
        *("float16", "float32", "float64", "int32", "int64", "uint8", "log_softmax", "log2", "log10", "arctan", "tan"),
        *(
            "append",
            "matrix_exp",
            "linalg",
            "sparse",
            "functional",
            "nn",
            "special",
            "pi",
            "inf",
            "mm",
            "addmm",
            "spmm",
        ),
    }
)
"""Attributes of tensors, of lists, of distributions and of these packages; those that end with `_` change a tensor."""
_BUILTINS: Final = SCALARS | {"len", "sum", "enumerate", "zip", "list", "tuple", "bool", "reversed", "True", "False"}
_CONTEXTS: Final = frozenset({"no_grad", "inference_mode", "autocast"})
_WITHOUT_GRADIENTS: Final = frozenset({"no_grad", "inference_mode"})
_OTHER: Final = (
    *(ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Delete, ast.Try),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Import, ast.ImportFrom, ast.While),
    *(ast.NamedExpr, ast.Match),
)
_MOST_DEPTH: Final = 4


@dataclass(frozen=True)
class Pure:
    """A function that only computes."""

    models: frozenset[str]
    """Arguments that it calls, without gradients: what it gives depends on their weights, too."""


class PureFunctions:
    """Those of a file."""

    def __init__(self, tree: ast.Module) -> None:
        self._packages = {name for name, of in imported_names(tree).items() if only_computes(of)}
        defined = [each for each in tree.body if isinstance(each, Function)]
        self._functions = {each.name: each for each in defined}
        self._constants = {
            name.id
            for each in tree.body
            if isinstance(each, ast.Assign) and all(isinstance(part, _PLAIN) for part in nodes_of(each.value))
            for target in each.targets
            for name in nodes_of(target)
            if isinstance(name, ast.Name)
        } - {name for each in nodes_of(tree) if isinstance(each, ast.Global) for name in each.names}
        self._known: dict[Function, Pure | None] = {}

    def read(self, function: Function, depth: int = 0) -> Pure | None:
        """What is known of a function that only computes; None: it may do something else."""
        if function not in self._known:
            self._known[function] = None  # if it calls itself
            self._known[function] = self._read(function, depth)
        return self._known[function]

    def _read(self, function: Function, depth: int) -> Pure | None:
        nodes = [node for statement in function.body for node in nodes_of(statement)]
        if (
            depth > _MOST_DEPTH
            or isinstance(function, ast.AsyncFunctionDef)
            or function.args.vararg
            or function.args.kwarg
        ):
            return None
        if any(isinstance(node, (*_OTHER, *Function.__args__)) for node in nodes):
            return None
        if not all(_last(each) in _WITHOUT_GRADIENTS for each in function.decorator_list):
            return None
        parameters = {each.arg for each in nodes_of(function.args) if isinstance(each, ast.arg)}
        stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        scope = _Scope(self, parameters, stored, is_without_gradients=_is_without_gradients(function), depth=depth)
        return Pure(frozenset(scope.models)) if all(map(scope.allows, nodes)) else None

    def function(self, name: str) -> Function | None:
        """The function of the file of this name."""
        return self._functions.get(name)

    def is_known(self, name: str) -> bool:
        """Whether a name of the file is a package that only computes, a number or a function."""
        return name in self._packages | self._constants | self._functions.keys() or name in _BUILTINS | _CONTEXTS

    def is_package(self, name: str) -> bool:
        """Whether a name of the file is a package, or a function of one, that only computes."""
        return name in self._packages


class _Scope:
    """The names of a function."""

    def __init__(
        self, file: PureFunctions, parameters: set[str], stored: set[str], *, is_without_gradients: bool, depth: int
    ) -> None:
        self._file = file
        self._given = parameters
        self._own = stored - parameters
        self._all = stored | parameters
        self._is_without_gradients = is_without_gradients
        self._depth = depth
        self.models = set[str]()

    def allows(self, node: ast.AST) -> bool:
        """Whether a part of the function only computes."""
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                return name in self._all or self._file.is_known(name)
            case ast.Attribute(attr=name, ctx=ctx):
                return isinstance(ctx, ast.Load) and (name.rstrip("_") in _METHODS or name in _CONTEXTS)
            case ast.Subscript(value=value, ctx=ast.Store()):
                return root_of(value) in self._own
            case ast.AugAssign(target=target):
                return root_of(target) in self._own
            case ast.With(items=items):
                return all(_last(each.context_expr) in _CONTEXTS for each in items)
            case ast.Call():
                return self._allows_call(node)
            case ast.keyword(arg=name):
                return name not in ("out", "generator", "requires_grad", None)
            case _:
                return True

    def _allows_call(self, call: ast.Call) -> bool:
        match call.func:
            case ast.Name(id=name) if name in self._given:
                self.models.add(name)
                return self._is_without_gradients
            case ast.Name(id=name) if (function := self._file.function(name)) is not None:
                pure = self._file.read(function, self._depth + 1)
                return pure is not None and not pure.models
            case ast.Name(id=name):
                return name in _BUILTINS | _CONTEXTS or (self._file.is_package(name) and name in _METHODS)
            case ast.Attribute(value=value, attr=name):
                changes = name.endswith("_") or name == "append"
                return not changes or _changed(value) in self._own | {""}
            case _:
                return False


_PLAIN: Final = (ast.Constant, ast.Tuple, ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator)
"""What a number of a file is made of."""


def _is_without_gradients(function: Function) -> bool:
    if function.decorator_list:
        return True
    body = [each for each in function.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    match body:
        case [ast.With(items=[item])]:
            return _last(item.context_expr) in _WITHOUT_GRADIENTS
        case _:
            return False


def _last(node: ast.expr) -> str:
    """`no_grad` of `torch.no_grad()`."""
    if isinstance(node, ast.Call):
        return last_name(node)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _changed(node: ast.expr) -> str:
    """The name of the object that is changed with an expression; empty: it is a new one."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(node, ast.Call) and last_name(node) in COMPUTE | ROOM | NUMBERS:
            return ""
        node = node.func if isinstance(node, ast.Call) else node.value
    return root_of(node)
