"""Reads in the source of a program which names stand for models that give the same for the same.

Only models whose class is in the file, and is made of nothing but layers that draw nothing and keep nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Set
from typing import Final

from gpulaunch.profiler.samplers.function_bodies import is_plain_call, is_set
from gpulaunch.profiler.samplers.loops import Function, calls_in, imported_names, last_name, method_name, word_of
from gpulaunch.profiler.samplers.syntax import assigned_in, dotted, names_in, nodes_of, root_of
from gpulaunch.profiler.samplers.tensor_functions import COMPUTE, NUMBERS, ROOM, SHAPES, VIEWS, only_computes

_GIVES: Final = (
    COMPUTE | VIEWS | SHAPES | {"log_prob", "entropy", "log_softmax", "argmax", "gather", "detach", "max", "min"}
)
"""Methods of tensors, and of distributions, that only give a result; so do torch's functions of these names."""
_BUILTINS: Final = frozenset({"range", "len", "zip", "enumerate", "reversed", "int", "float", "min", "max", "sum"})
_LAYERS: Final = frozenset(
    {
        *("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "LayerNorm", "RMSNorm", "GroupNorm", "Sequential"),
        *("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "Flatten", "ModuleList", "Parameter"),
    }
)
_DISTRIBUTIONS: Final = frozenset({"Normal", "Categorical", "Independent"})
_IN_PLACE: Final = frozenset({"eval", "requires_grad_"})
"""Methods of a model that return it."""
_PARAMETERS: Final = frozenset({"parameters", "named_parameters"})
_HANDS_OUT: Final = (ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await, ast.Delete)


class Models:
    """The models of a file, known by the last words of their names: `teacher` of `self.teacher`."""

    def __init__(self, tree: ast.Module) -> None:
        self._packages = {name for name, of in imported_names(tree).items() if only_computes(of)}
        self._classes = set(_LAYERS)
        for each in tree.body:
            if isinstance(each, ast.ClassDef) and self._is_plain(each):  # those that it is made of are above it
                self._classes.add(each.name)
        self._made: dict[str, list[ast.expr]] = {}
        for target, value in assigned_in(nodes_of(tree)):
            if word_of(target) != word_of(value):  # not `self.net = net`
                self._made.setdefault(word_of(target), []).append(value)
        self._words = {word for word, made in self._made.items() if all(map(self._is_made, made))}
        self._copies = {word for word, made in self._made.items() if all(map(self._is_copy, made))}
        self._given = {_object_of(call) for call in calls_in(tree) if method_name(call) in _PARAMETERS}

    def gives_the_same(self, node: ast.expr) -> bool:
        """Whether it is a model, or a copy of one, that gives the same for the same as long as it is not trained."""
        return dotted(node) != "" and word_of(node) in self._words | self._copies

    def is_never_trained(self, node: ast.expr) -> bool:
        """Whether it is a copy of a model whose parameters nothing in the file asks for."""
        return dotted(node) != "" and word_of(node) in self._copies - self._given

    def only_computes(self, call: ast.Call) -> bool:
        """Whether a function of torch, or a method of a tensor, is called that gives a result and does nothing else."""
        name = last_name(call)
        if not is_plain_call(call):
            return False
        if self.is_of_package(call.func):
            return name in _GIVES | NUMBERS | ROOM
        return name in _GIVES if isinstance(call.func, ast.Attribute) else name in _BUILTINS

    def is_of_package(self, node: ast.expr) -> bool:
        """Whether it is of a package that only computes with tensors: `torch.nn.functional.pad`."""
        return root_of(node, views=False) in self._packages

    def _is_made(self, value: ast.expr) -> bool:
        """Whether it is a model that a class of the file, or a layer of torch, has made: `Net().to(device)`."""
        value = _before(value, VIEWS | _IN_PLACE)
        if not isinstance(value, ast.Call) or last_name(value) not in self._classes:
            return False
        return all(name in self._classes for name in map(last_name, calls_in(value)) if name[:1].isupper())

    def _is_copy(self, value: ast.expr) -> bool:
        """`copy.deepcopy(policy).eval()`"""
        match _before(value, _IN_PLACE):
            case ast.Call(args=[of]) as call if last_name(call) == "deepcopy":
                return word_of(of) in self._words
            case _:
                return False

    def _is_plain(self, module: ast.ClassDef) -> bool:
        """Whether a class has a `forward`, and whatever its objects compute depends on their arguments alone."""
        methods = {each.name: each for each in module.body if isinstance(each, ast.FunctionDef)}
        init = methods.pop("__init__", None)
        if "forward" not in methods or init is None:
            return False
        made = [name for name in map(last_name, calls_in(init)) if name[:1].isupper()]
        layers = {
            word_of(target)
            for target, value in assigned_in(nodes_of(init))
            if dotted(target).startswith("self.") and any(last_name(call) in self._classes for call in calls_in(value))
        }
        return all(name in self._classes for name in made) and all(
            sets_only_names(nodes_of(each))
            and all(self._is_harmless(call, each, layers | methods.keys()) for call in calls_in(each))
            for each in methods.values()
        )

    def _is_harmless(self, call: ast.Call, method: Function, own: Set[str]) -> bool:
        """Whether a call in a method is one of the layers and methods of its object, or only computes."""
        function = call.func
        if self.only_computes(call) or last_name(call) in _DISTRIBUTIONS:
            return True
        while isinstance(function, ast.Subscript):  # `self.layers[-1](x)`
            function = function.value
        if isinstance(function, ast.Name):  # `for layer in self.layers: x = layer(x)`
            loops = (
                each for each in nodes_of(method) if isinstance(each, ast.For) and function.id in names_in(each.target)
            )
            through = [_attributes_of_self(each.iter) for each in loops]
            return bool(through) and all(each and each <= own for each in through)
        return dotted(function).startswith("self.") and word_of(function) in own


def sets_only_names(nodes: Iterable[ast.AST]) -> bool:
    """Whether a part of a tree sets names alone, no attribute or element of anything, and hands nothing out.

    Args:
        nodes: all of it.
    """
    return not any(
        isinstance(node, _HANDS_OUT) or (isinstance(node, ast.Attribute | ast.Subscript) and is_set(node))
        for node in nodes
    )


def _before(value: ast.expr, methods: Set[str]) -> ast.expr:
    """What some methods were called on, one after the other: `Net()` of `Net().to(device).eval()`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in methods:
        value = value.func.value
    return value


def _attributes_of_self(node: ast.expr) -> set[str]:
    attributes = (each for each in nodes_of(node) if isinstance(each, ast.Attribute))
    return {each.attr for each in attributes if dotted(each).startswith("self.")}


def _object_of(call: ast.Call) -> str:
    """The word of the object of which a method is called: `teacher` of `self.teacher.eval()`."""
    return word_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
