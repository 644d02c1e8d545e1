"""Reads in the source of a program which names stand for its models, and what becomes of these."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence, Set
from typing import Final

from gpulaunch.profiler.samplers.function_bodies import is_set
from gpulaunch.profiler.samplers.loops import calls_in, last_name, method_name, word_of
from gpulaunch.profiler.samplers.syntax import assigned_in, nodes_of, words_in
from gpulaunch.profiler.samplers.tensor_functions import VIEWS

DRAWS: Final = re.compile(r"\w*(?:rand|drop|noise|bernoulli|multinomial|normal_|sample|shuffle|BatchNorm)\w*", re.I)
"""Words of what gives something else in every call, or changes itself."""
_OF_A_MODEL: Final = frozenset({"eval", "train", "parameters", "requires_grad_", "load_state_dict", "state_dict"})
_PARAMETERS: Final = frozenset({"parameters", "named_parameters"})
_COPIES: Final = frozenset({"deepcopy", "from_pretrained"})
_LAYERS: Final = frozenset(
    {
        *("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding", "LayerNorm", "RMSNorm", "GroupNorm", "Sequential"),
        *("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "Flatten", "ModuleList"),
    }
)
"""Modules of torch that give the same for the same."""


class Models:
    """The models of a file, known by the last words of their names: `teacher` of `self.teacher`."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = nodes_of(tree)
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.made: dict[str, list[ast.expr]] = {}
        """What each name of the file, model or not, is assigned."""
        for target, value in assigned_in(nodes):
            if word_of(target) != word_of(value):  # not `self.net = net`
                self.made.setdefault(word_of(target), []).append(value)
        modules = [each for each in tree.body if isinstance(each, ast.ClassDef) and _has_forward(each)]
        self.classes = {each.name for each in modules} | _LAYERS
        self.words = {_object_of(each) for each in calls if method_name(each) in _OF_A_MODEL}
        self.words |= {word for word, made in self.made.items() if _are_made_by(made, self.classes)}
        self.weights = {word for word, values in self.made.items() if any(map(_takes_weights, values))}
        """Names of lists of their parameters."""
        optimizers = (call for call in calls if last_name(call)[:1].isupper())
        given = (each for call in optimizers for each in calls_in(call))
        self._trained = {_object_of(each) for each in given if method_name(each) in _PARAMETERS}
        self._evaluated = {_object_of(each) for each in calls if method_name(each) == "eval"}
        self._draws = any(map(_draws, modules))

    def gives_the_same(self, word: str) -> bool:
        """Whether it is a model that gives the same for the same, as long as it is not trained."""
        return word in self.words and (word in self._evaluated or (not self._draws and self._is_own(word)))

    def is_never_trained(self, word: str) -> bool:
        """Whether no optimizer has the parameters of a model."""
        return self._is_own(word) and word not in self._trained

    def _is_own(self, word: str) -> bool:
        """Whether it is made here, or a copy, so that it is no other name of another one."""
        return _are_made_by(self.made.get(word, []), self.classes | _COPIES)


def _are_made_by(values: Sequence[ast.expr], makes: Set[str]) -> bool:
    """Whether all are results of some functions and classes, or of a method of one: `deepcopy(model).eval()`."""
    return len(values) > 0 and all(_is_made_by(each, makes) for each in values)


def _is_made_by(value: ast.expr, makes: Set[str]) -> bool:
    while isinstance(value, ast.Call) and method_name(value) in _OF_A_MODEL | VIEWS:
        value = value.func.value if isinstance(value.func, ast.Attribute) else value
    parts = (name for name in map(last_name, calls_in(value)) if name[:1].isupper() or name in _COPIES)
    return isinstance(value, ast.Call) and last_name(value) in makes and all(name in makes for name in parts)


def _takes_weights(value: ast.expr) -> bool:
    is_optimizer = isinstance(value, ast.Call) and last_name(value)[:1].isupper()
    return not is_optimizer and any(method_name(call) in _PARAMETERS | {"state_dict"} for call in calls_in(value))


def _is_forward(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "forward"


def _has_forward(each: ast.ClassDef) -> bool:
    return any(map(_is_forward, each.body))


def _draws(module: ast.ClassDef) -> bool:
    """Whether a forward pass may draw random numbers, or set an attribute, which the next one may read."""
    for method in module.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            made = (last_name(call) for call in calls_in(method))
            words = {name for name in made if name[:1].isupper()}
        else:
            words = words_in(method)
        keeps = (isinstance(node, ast.Attribute) and is_set(node) for node in nodes_of(method))
        if any(map(DRAWS.fullmatch, words)) or (_is_forward(method) and any(keeps)):
            return True
    return False


def _object_of(call: ast.Call) -> str:
    """The word of the object of which a method is called: `teacher` of `self.teacher.eval()`."""
    return word_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
