"""Finds in the source of a program what a loop computes in every turn, although nothing that it depends on changes.

    for rows in torch.randperm(len(obs)).split(256):
        with torch.no_grad():
            old_logp = old(obs)[0].log_prob(act)
        ...

Only what is certain by the words of the source counts. So all of the loop must be known: it sets only names, and calls
only functions that give a result and do nothing else, models that are known, and what a training step needs. Where it
trains, only what a copy of a model gives that nothing trains is the same, and no gradients may go through that.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpulaunch.profiler.samplers.function_bodies import (
    arguments_of,
    is_set,
    is_without_gradients,
    lines_without_gradients,
    statements_in,
)
from gpulaunch.profiler.samplers.known_models import Models, sets_only_names
from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, lines_of, method_name
from gpulaunch.profiler.samplers.syntax import (
    assigned_in,
    dotted,
    names_in,
    nodes_of,
    root_of,
    times_read,
)
from gpulaunch.profiler.samplers.tensor_functions import OF_A_TENSOR, ROOM, SHAPES, TRANSPOSED, VIEWS

_Loop = ast.For | ast.While

_OF_TRAINING: Final = frozenset({"step", "zero_grad", "backward"})
_OF_LOOPS: Final = frozenset(
    {
        *("append", "item", "parameters", "print", "clip_grad_norm_", "clip_grad_value_", "time", "perf_counter"),
        *("monotonic", "randperm", "randint", "rand", "randn", "rand_like", "randn_like"),
    }
)
"""What a loop may call besides: it changes nothing that another line computes with."""
_UNKNOWN: Final = (ast.Try, ast.Return, ast.Raise, ast.Continue, ast.Lambda, Function, ast.ClassDef, ast.Match)
"""Statements by which a turn may leave out others, or end the loop as soon as one has succeeded."""
_PLAIN: Final = (
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.Tuple, ast.List, ast.Subscript, ast.Slice, ast.keyword, ast.Starred),
)
"""Expressions that are the same if their parts are."""
_MOST_DEPTH: Final = 4
"""Functions of the file that call each other and are followed."""


def invariants_of_loops(tree: ast.Module, models: Models) -> dict[int, bool]:
    """Return the lines of loops that compute the same in every turn, and whether gradients go through what they do.

    Args:
        tree: of a file.
        models: of it.
    """
    functions = [node for node in nodes_of(tree) if isinstance(node, Function)]  # the innermost last
    scopes: dict[_Loop, ast.AST] = {
        node: scope
        for scope in (tree, *functions)
        for node in nodes_of(scope)
        if isinstance(node, _Loop) and any(_statements(node.body))
    }
    file = _File(tree, models) if scopes else None
    return {} if file is None else dict(line for loop, scope in scopes.items() for line in file.lines(loop, scope))


@dataclass(frozen=True)
class _Turns:
    """What the turns of a loop leave as it is."""

    sets: frozenset[str] = frozenset()
    """The names that they set, and of the lists that they add to."""
    trains: bool = False

    def leave(self, node: ast.expr) -> bool:
        """Whether it is the same object, with the same values, in every turn."""
        return self.sets.isdisjoint(names_in(node)) and (not self.trains or isinstance(node, ast.Name))


_Known = Mapping[str, ast.expr]
"""The arguments and the names of a function, and what the arguments are."""


class _File:
    """What a file says of its functions and models."""

    def __init__(self, tree: ast.Module, models: Models) -> None:
        nodes = nodes_of(tree)
        self._models = models
        self._functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
        self._without_gradients = lines_without_gradients(tree)
        self._arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}

    def lines(self, loop: _Loop, scope: ast.AST) -> Iterator[tuple[int, bool]]:
        """As `invariants_of_loops`, of one loop of a function, or of the module."""
        nodes = nodes_of(loop)
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        trains = not _OF_TRAINING.isdisjoint(map(last_name, calls))
        if not self._is_known(nodes) or (not trains and any(isinstance(node, ast.Break) for node in nodes)):
            return
        sets = Counter(node.id for node in nodes if isinstance(node, ast.Name) and is_set(node))
        appends = [call for call in calls if method_name(call) == "append"]
        kept = {each.id for call in appends for each in call.args if isinstance(each, ast.Name)}
        grown = {name for call in appends for name in names_in(call.func)}
        turns, reads = _Turns(frozenset(sets) | grown, trains), times_read(nodes)
        for statement in _statements(loop.body, sets):
            names = {name for target in statement.targets for name in names_in(target)}
            if not all(sets[name] == 1 for name in names) or not any(reads[name] for name in names - kept):
                continue
            if trains and not (self._is_without_gradients(statement) and self._is_of_copy(statement.value, scope)):
                continue
            if self._is_same(statement.value, turns, {}):
                yield from ((line, not self._is_without_gradients(statement)) for line in lines_of(statement))

    def _is_known(self, nodes: Sequence[ast.AST]) -> bool:
        """Whether nothing in a loop or a function may change what another line of it computes with."""
        if not sets_only_names(nodes) or any(isinstance(node, _UNKNOWN) for node in nodes):
            return False
        for node in nodes:
            match node:
                case ast.AugAssign(value=value) if not _is_number(value):
                    return False  # the same tensor may have another name
                case ast.withitem(context_expr=context) if not is_without_gradients(context):
                    return False
                case ast.Call() if not self._is_harmless(node):
                    return False
                case _:
                    pass
        return True

    def _is_harmless(self, call: ast.Call) -> bool:
        """Whether a call, its arguments apart, changes nothing that another line computes with."""
        if last_name(call) in _OF_TRAINING | _OF_LOOPS or self._models.only_computes(call):
            return True
        if isinstance(call.func, ast.Name) and (function := self._functions.get(call.func.id)) is not None:
            return self._only_computes(function, call, _Turns(), 0)
        return self._models.gives_the_same(call.func)

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

    def _is_of_copy(self, value: ast.expr, scope: ast.AST) -> bool:
        """Whether it is computed with a model that nothing trains, of what has no other name in a function, and no
        object of it has, such as an optimizer."""
        names = names_in(value)
        models = {each.id for each in nodes_of(value) if isinstance(each, ast.Name) and self._is_fixed(each)}
        objects = (call for call in calls_in(scope) if last_name(call)[:1].isupper())
        shared = {name for call in objects for part in (*call.args, *call.keywords) for name in names_in(part)}
        for target, assigned in assigned_in(nodes_of(scope)):
            if not isinstance(assigned, ast.Call):
                shared |= names_in(target)
        return len(models) > 0 and shared.isdisjoint(names - models)

    def _is_fixed(self, node: ast.expr) -> bool:
        return self._models.is_never_trained(node) and names_in(node).isdisjoint(self._arguments)

    def _is_same(self, node: ast.AST, turns: _Turns, known: _Known, depth: int = 0) -> bool:
        """Whether an expression gives the same in every turn; `known`: of the function of it."""
        match node:
            case ast.Constant():
                return True
            case ast.Attribute(value=value, attr=name) if name in OF_A_TENSOR | TRANSPOSED:
                return self._is_same(value, turns, known, depth)
            case ast.Name() | ast.Attribute() if dotted(node):
                return root_of(node) in known or turns.leave(node)
            case ast.Call():
                return self._gives_the_same(node, turns, known, depth)
            case _ if isinstance(node, _PLAIN):
                parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr | ast.keyword)]
                return all(self._is_same(each, turns, known, depth) for each in parts)
            case _:
                return False

    def _gives_the_same(self, call: ast.Call, turns: _Turns, known: _Known, depth: int) -> bool:
        if not all(self._is_same(each, turns, known, depth) for each in (*call.args, *call.keywords)):
            return False
        match call.func:
            case ast.Name(id=name) if name in self._functions:
                return depth < _MOST_DEPTH and self._only_computes(self._functions[name], call, turns, depth + 1)
            case function if self._models.only_computes(call):
                on = function.value if isinstance(function, ast.Attribute) else None
                return on is None or self._models.is_of_package(function) or self._is_same(on, turns, known, depth)
            case function:
                model = known.get(function.id, function) if isinstance(function, ast.Name) else function
                return (
                    self._is_fixed(model) if turns.trains else self._models.gives_the_same(model) and turns.leave(model)
                )

    def _only_computes(self, function: ast.FunctionDef, call: ast.Call, turns: _Turns, depth: int) -> bool:
        """Whether a function of the file only returns what it computes of its arguments."""
        known = dict(zip((each.arg for each in function.args.args), call.args, strict=False))
        known |= {each.arg: each.value for each in call.keywords if each.arg}
        if known.keys() != arguments_of(function):
            return False
        for statement in statements_in(function.body):
            match statement:
                case ast.Expr(value=ast.Constant()):
                    pass
                case ast.With(items=[item]) if is_without_gradients(item.context_expr):
                    pass
                case ast.Return(value=value) if value is not None and self._is_same(value, turns, known, depth):
                    pass
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if self._is_same(value, turns, known, depth):
                    known[name] = value
                case _:
                    return False
        return True


def _statements(body: Iterable[ast.stmt], sets: Container[str] = ()) -> Iterator[ast.Assign]:
    """The statements that each turn makes, and that may take time.

    `sets`: names that the turns set; what depends on one of these is not made by each of them."""
    for statement in body:
        match statement:
            case ast.Assign(value=value) if _computes(value):
                yield statement
            case ast.With():
                yield from _statements(statement.body, sets)
            case ast.If(test=test) if not any(calls_in(test)) and not any(name in sets for name in names_in(test)):
                yield from _statements(statement.body, sets)
            case _:
                pass


def _is_number(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) or (isinstance(value, ast.Call) and method_name(value) == "item")


def _computes(value: ast.expr) -> bool:
    """Whether an expression may do more than give a part of something another form."""
    return any(last_name(call) not in ROOM | VIEWS | SHAPES | {"clone"} for call in calls_in(value)) or any(
        isinstance(node, ast.MatMult) for node in nodes_of(value)
    )
