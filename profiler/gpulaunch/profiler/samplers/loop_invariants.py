"""Finds in the source of a program what a loop computes in every turn, although nothing that it depends on changes.

    for rows in torch.randperm(len(obs)).split(256):
        with torch.no_grad():
            old_logp = old(obs)[0].log_prob(act)
        ...

Only what is certain by the words of the source counts: the loop sets and changes none of the objects that are read, and
all that is called is known to give a result and do nothing else, or is a model that the loop does not train, and that
draws no random numbers. Where a loop calls `backward`, it may take no gradients.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from gpulaunch.profiler.samplers.changed_objects import Changes, aliases_in, called_in, calls_between, reachable
from gpulaunch.profiler.samplers.function_bodies import arguments_of, changed_by, is_plain_call, is_set, statements_in
from gpulaunch.profiler.samplers.known_models import DRAWS, Models
from gpulaunch.profiler.samplers.loops import (
    BACKWARD,
    Function,
    calls_in,
    imported_names,
    last_name,
    lines_of,
    word_of,
)
from gpulaunch.profiler.samplers.syntax import dotted, lines_without_gradients, nodes_of, root_of, words_in
from gpulaunch.profiler.samplers.tensor_functions import (
    COMPUTE,
    OF_A_TENSOR,
    ROOM,
    SHAPES,
    TRANSPOSED,
    VIEWS,
    only_computes,
)

_Loop = ast.For | ast.While
_KEEPS: Final = re.compile(r"\w*(?:cache|past|memo|buffer|history|queue|state|loader|generator|iter|env)\w*", re.I)
"""Names of objects that may change though no statement says so."""
_GIVES: Final = COMPUTE | VIEWS | SHAPES | {"log_prob", "entropy", "log_softmax", "argmax", "gather", "detach", "item"}
"""Methods of tensors, and of distributions, that only give a result."""
_PLAIN: Final = (
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.Tuple, ast.List, ast.Subscript, ast.Slice, ast.keyword, ast.Starred),
)
"""Expressions that are the same if their parts are."""
_MOST_DEPTH: Final = 4
"""Functions of the file that call each other and are followed."""


@dataclass(frozen=True)
class _Turns:
    """What the turns of a loop change."""

    names: frozenset[str]
    """What they set."""
    words: frozenset[str]
    """Of the objects that they change."""
    trains: bool
    """They call `step`, as of an optimizer."""
    goes_back: bool
    """They call `backward`."""

    def leave(self, node: ast.expr) -> bool:
        """Whether they leave a named object as it is."""
        words = words_in(node)
        return self.names.isdisjoint(words) and self.words.isdisjoint(words) and not any(map(_KEEPS.fullmatch, words))


_Known = Mapping[str, ast.expr]
"""The arguments and the names of a function that are the same in every turn, and what the arguments are."""


def invariants_of_loops(tree: ast.Module) -> dict[int, bool]:
    """Return the lines of loops that compute the same in every turn, and whether gradients go through what they do.

    Args:
        tree: of a file.
    """
    loops = [node for node in nodes_of(tree) if isinstance(node, _Loop) and any(_candidates(node))]
    return dict(_File(tree).lines(loops)) if loops else {}


class _File:
    """What a file says of its functions and models."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = nodes_of(tree)
        functions = [node for node in nodes if isinstance(node, Function)]
        self._calls = calls_between(functions)
        self._changes = Changes(functions, self._calls)
        self._imported = imported_names(tree)
        self._without_gradients = lines_without_gradients(tree)
        self._functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
        self._methods_called: dict[str, set[str]] = {}
        for function in functions:
            self._methods_called.setdefault(function.name, set()).update(map(last_name, calls_in(function)))
        self._models = Models(tree)
        self._views: dict[str, set[str]] = {}  # names of what may be the same memory
        for word, values in self._models.made.items():
            for of in filter(None, map(_viewed, values)):
                self._views.setdefault(word, set()).add(of)
                self._views.setdefault(of, set()).add(word)

    def lines(self, loops: Iterable[_Loop]) -> Iterator[tuple[int, bool]]:
        """As `invariants_of_loops`, of some loops."""
        for loop in loops:
            turns = self._turns(loop)
            for statement in _candidates(loop):
                if self._is_repeated(statement, loop, turns):
                    has_gradients = not self._is_without_gradients(statement)
                    if not (has_gradients and turns.goes_back):
                        yield from ((line, has_gradients) for line in lines_of(statement))

    def _turns(self, loop: _Loop) -> _Turns:
        nodes = nodes_of(loop)
        aliases = aliases_in(nodes)
        words = {word for each in statements_in(loop.body) for word in self._changes.by(each, aliases)}
        called = set(map(last_name, calls_in(loop)))
        for function in reachable(called_in(nodes), self._calls):
            called |= self._methods_called.get(function, set())
        for call in calls_in(loop):
            if not self._is_of_package(call.func):  # it may change what it is a method of, or what it is given
                if isinstance(call.func, ast.Attribute) and call.func.attr not in _GIVES:
                    words |= words_in(call.func.value)
                if not self._is_known(call.func):
                    words.update(word for each in call.args if dotted(each) for word in words_in(each))
        words |= {name for node in nodes for name in changed_by(node)}
        words = reachable(words - {"self"}, self._views)
        if not self._models.weights.isdisjoint(words):
            words |= self._models.words
        names = {node.id for node in nodes if isinstance(node, ast.Name) and is_set(node)}
        return _Turns(frozenset(names), frozenset(words), "step" in called, bool(BACKWARD & called))

    def _is_known(self, function: ast.expr) -> bool:
        """Whether what is called changes what it is given only where the file says so: a function of it, or a model."""
        name, word = dotted(function), word_of(function)
        return name in self._functions or name in dir(builtins) or word in self._models.words | self._models.classes

    def _is_repeated(self, statement: ast.Assign, loop: _Loop, turns: _Turns) -> bool:
        """Whether a statement computes the same in every turn, and nothing else changes its result."""
        targets = [
            part for each in statement.targets for part in (each.elts if isinstance(each, ast.Tuple) else [each])
        ]
        names = {each.id for each in targets if isinstance(each, ast.Name)}
        if len(names) != len(targets) or not self._is_same(statement.value, turns, {}):
            return False
        others = (each for each in statements_in(loop.body) if each is not statement)
        return names.isdisjoint(word for each in others for word in self._changes.by(each, {}))

    def _is_without_gradients(self, statement: ast.Assign) -> bool:
        """Whether all of it is computed without gradients, by itself or by the function that it calls."""
        if statement.lineno in self._without_gradients:
            return True
        match statement.value:
            case ast.Call(func=ast.Name(id=name)) if name in self._functions:
                *_, last = self._functions[name].body
                return last.end_lineno in self._without_gradients
            case _:
                return False

    def _is_same(self, node: ast.AST, turns: _Turns, known: _Known, depth: int = 0) -> bool:
        """Whether an expression gives the same in every turn; `known`: of the function of it."""
        match node:
            case ast.Constant():
                return True
            case ast.Name(id=name) if name in known:
                return True
            case ast.Attribute(value=value, attr=name) if name in OF_A_TENSOR | TRANSPOSED:
                return self._is_same(value, turns, known, depth)
            case ast.Name() | ast.Attribute() if dotted(node):
                return self._is_of_package(node) or (root_of(node) not in known and turns.leave(node))
            case ast.Call():
                return self._gives_the_same(node, turns, known, depth)
            case _ if isinstance(node, _PLAIN):
                parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr | ast.keyword)]
                return all(self._is_same(each, turns, known, depth) for each in parts)
            case _:
                return False

    def _gives_the_same(self, call: ast.Call, turns: _Turns, known: _Known, depth: int) -> bool:
        parts = [*call.args, *call.keywords]
        if not is_plain_call(call) or not all(self._is_same(each, turns, known, depth) for each in parts):
            return False
        match call.func:
            case ast.Attribute(attr=name) | ast.Name(id=name) if self._is_of_package(call.func):
                return (
                    name[:1].islower() and not name.endswith("_") and not any(map(DRAWS.fullmatch, words_in(call.func)))
                )
            case ast.Name(id=name) if name in self._functions:
                return depth < _MOST_DEPTH and self._only_computes(self._functions[name], call, turns, depth + 1)
            case ast.Attribute(value=on, attr=name) if name in _GIVES:
                return self._is_same(on, turns, known, depth)
            case ast.Name(id=name) if name in known:
                return self._is_fixed_model(known[name], turns)
            case _:
                return self._is_fixed_model(call.func, turns)

    def _only_computes(self, function: ast.FunctionDef, call: ast.Call, turns: _Turns, depth: int) -> bool:
        """Whether a function of the file only returns what it computes, of arguments that are the same."""
        known = dict(zip((each.arg for each in function.args.args), call.args, strict=False))
        known |= {each.arg: each.value for each in call.keywords if each.arg}
        if known.keys() != arguments_of(function):
            return False
        for statement in statements_in(function.body):
            match statement:
                case ast.Expr(value=ast.Constant()) | ast.With():
                    pass
                case ast.Return(value=value) if value is not None and self._is_same(value, turns, known, depth):
                    pass
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if self._is_same(value, turns, known, depth):
                    known[name] = value
                case _:
                    return False
        return True

    def _is_fixed_model(self, node: ast.expr, turns: _Turns) -> bool:
        """Whether it is a model that the turns do not train, and that gives the same for the same."""
        word = word_of(node)
        if not dotted(node) or not turns.leave(node) or root_of(node) in self._imported:
            return False
        return self._models.gives_the_same(word) and (not turns.trains or self._models.is_never_trained(word))

    def _is_of_package(self, node: ast.expr) -> bool:
        """Whether it is of a package that only computes with tensors: `torch.nn.functional.pad`."""
        of = self._imported.get(root_of(node, views=False), "")
        return of != "" and only_computes(of)


def _candidates(loop: _Loop) -> Iterator[ast.Assign]:
    return (each for each in statements_in(loop.body) if isinstance(each, ast.Assign) and _computes(each.value))


def _computes(value: ast.expr) -> bool:
    """Whether an expression may do more than give a part of something another form."""
    return any(last_name(call) not in ROOM | VIEWS | SHAPES for call in calls_in(value)) or any(
        isinstance(node, ast.MatMult) for node in nodes_of(value)
    )


def _viewed(value: ast.expr) -> str:
    """The word of the object that a value is, or is a part or a view of; empty: it is something else."""
    while not dotted(value):
        match value:
            case ast.Subscript(value=of) | ast.Attribute(value=of):
                value = of
            case ast.Call(func=ast.Attribute(value=of, attr=name)) if name in VIEWS | {"detach"}:
                value = of
            case _:
                return ""
    return word_of(value)
