"""Finds in the source of a program the objects that its statements change, such as a buffer of samples, or a model."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from gpulaunch.profiler.samplers.loops import calls_in, last_name
from gpulaunch.profiler.samplers.syntax import dotted, nodes_of, root_of, words_in

_Simple = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign

_PARTS: Final = frozenset({"parameters", "named_parameters", "modules"})
"""Methods that go through the parts of a model."""
_MODES: Final = frozenset({"train", "eval"})
"""Methods that change nothing of a model that is not changed back."""
_IN_PLACE: Final = re.compile(r"(?!requires_grad_)[a-z].*[a-z]_")
"""Methods of tensors that change them."""


class Changes:
    """What the statements of a file change, also by the functions of the file that they call."""

    def __init__(self, tree: ast.Module) -> None:
        functions = [node for node in nodes_of(tree) if isinstance(node, ast.FunctionDef)]
        self._of_arguments = {each.name: _parameters_in(each, _changed_in) for each in functions}
        self._weights_of_arguments = {each.name: _parameters_in(each, _weights_changed_in) for each in functions}
        self._of_self = _changed_of_self(functions)
        self._trained = set(_trained_in(tree))

    def by(self, statement: ast.AST) -> set[str]:
        """What a statement sets, or calls a method of for what that does: `memory.add(step)`; or gives to a function of
        the file that changes it; or what a method of `self` that it calls changes of that."""
        if not isinstance(statement, _Simple):
            return set()
        names = set(_set_or_called(statement))
        for call in calls_in(statement):
            names.update(dotted(each) for each in _given(call, self._of_arguments))
            if method := _method_of_self(call):
                names.update(self._of_self.get(method, ()))
        return names

    def trained_weights(self, statement: ast.AST) -> bool:
        """Whether a statement changes the weights of what an optimizer trains, as one that clips or projects them."""
        if not isinstance(statement, _Simple | ast.For):
            return False
        given = (each for call in calls_in(statement) for each in _given(call, self._weights_of_arguments))
        return any(self._is_trained(each) for each in (*_weights_changed_in(statement), *given))

    def _is_trained(self, node: ast.expr) -> bool:
        return any(dotted(each) in self._trained for each in _wholes(node))


def set_by(node: ast.AST) -> str:
    """The name that a part of the target of an assignment sets; empty: it sets none."""
    return dotted(node) if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store) else ""


def _set_or_called(statement: _Simple) -> Iterator[str]:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=whole, attr=method))) if method not in _MODES:
            yield dotted(whole)
        case ast.Assign(targets=targets):
            yield from (set_by(part) for target in targets for part in nodes_of(target))
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            yield set_by(target)
        case _:
            pass


def _changed_in(part: ast.AST) -> Iterator[ast.expr]:
    """The objects that a method is called of for what that does, or that a part is set of."""
    for node in nodes_of(part):
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=whole, attr=method))) if method not in _MODES:
                yield whole
            case ast.Attribute(value=whole, ctx=ast.Store()) | ast.Subscript(value=whole, ctx=ast.Store()):
                yield whole
            case _:
                pass


def _weights_changed_in(part: ast.AST) -> Iterator[ast.expr]:
    """The tensors that are changed in place, `p.clamp_(-1, 1)` or `p.data = flat`, or the models that they are of:
    `for p in model.parameters(): ...`."""
    models = {
        target.id: model
        for loop in nodes_of(part)
        if isinstance(loop, ast.For)
        for each, through in _turns(loop)
        for target in nodes_of(each)
        if isinstance(target, ast.Name) and (model := _model_of(through)) is not None
    }
    for node in nodes_of(part):
        match node:
            case ast.Call(func=ast.Attribute(value=changed, attr=method)) if _IN_PLACE.fullmatch(method):
                pass
            case ast.Attribute(value=changed, attr="data", ctx=ast.Store()):
                pass
            case ast.Subscript(value=changed, ctx=ast.Store()):
                pass
            case _:
                continue
        if "grad" not in words_in(changed):
            yield models.get(root_of(changed), changed)


def _turns(loop: ast.For) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a loop sets, and what that is an element of."""
    match loop.target, loop.iter:
        case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=parts):
            yield from zip(targets, parts, strict=False)
        case target, through:
            yield target, through


def _model_of(node: ast.AST) -> ast.expr | None:
    """`model` of `model.parameters()`; None: it is no such call."""
    match node:
        case ast.Call(func=ast.Attribute(value=model, attr=method)) if method in _PARTS:
            return model
        case _:
            return None


def _trained_in(tree: ast.Module) -> Iterator[str]:
    """The models with whose parameters an object, such as an optimizer, is made."""
    for call in calls_in(tree):
        if last_name(call)[:1].isupper():
            models = (_model_of(each) for each in nodes_of(call))
            yield from (name for model in models if model is not None and (name := dotted(model)))


def _parameters_in(function: ast.FunctionDef, changed_in: Callable[[ast.AST], Iterable[ast.expr]]) -> set[int]:
    """Which of its arguments a function changes, at their positions."""
    names = {root_of(each, views=False) for each in changed_in(function)}
    return {at for at, each in enumerate(function.args.args) if each.arg in names}


def _given(call: ast.Call, positions: Mapping[str, Iterable[int]]) -> Iterator[ast.expr]:
    """The arguments of a call that are at the positions which count for the function of the file that it calls."""
    if isinstance(call.func, ast.Name):
        yield from (call.args[at] for at in positions.get(call.func.id, ()) if at < len(call.args))


def _wholes(node: ast.expr) -> Iterator[ast.expr]:
    """An object, and all that it is a part or a view of: `model.fc.weight.data`, `model.fc.weight`, ..., `model`."""
    yield node
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
        yield node


def _method_of_self(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(value=ast.Name(id="self"), attr=method):
            return method
        case _:
            return ""


def _changed_of_self(functions: Sequence[ast.FunctionDef]) -> dict[str, set[str]]:
    """What methods change of their objects, such as `self.memory`, also by other methods that they call."""
    changed: dict[str, set[str]] = {}
    calls: dict[str, set[str]] = {}
    for function in functions:
        statements = (each for each in nodes_of(function) if isinstance(each, _Simple))
        names = {name for each in statements for name in _set_or_called(each) if name.startswith("self.")}
        changed.setdefault(function.name, set()).update(names)
        calls.setdefault(function.name, set()).update(map(_method_of_self, calls_in(function)))
    return {name: {each for method in reachable(name, calls) for each in changed.get(method, ())} for name in changed}


def reachable(name: str, calls: Mapping[str, Iterable[str]]) -> set[str]:
    """A function and all functions that it calls, or that those call."""
    found, todo = set[str](), [name]
    while todo:
        each = todo.pop()
        if each not in found:
            found.add(each)
            todo += calls.get(each, ())
    return found
