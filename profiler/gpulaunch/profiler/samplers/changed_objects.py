"""Finds in the source of a program which objects it reads and which it changes, such as a buffer of samples.

An object is known by the words of its name, whatever it is an attribute of: `self.memory.rows[0]` by `memory` and
`rows`. So one that two parts of a program know by different names is two.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

from gpulaunch.profiler.samplers.function_bodies import is_set
from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, method_name
from gpulaunch.profiler.samplers.syntax import nodes_of, root_of

_Simple = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign

_NO_WORDS: Final = frozenset({"self", "data"})
_NO_CHANGE: Final = frozenset({"train", "eval", "set_postfix", "set_description"})
"""Methods called for what they do, on which no step depends: a mode that is set back, what a progress bar shows."""
_IN_PLACE: Final = re.compile(r"(?!requires_grad_)(?:_foreach_)?[a-z].*[a-z]_")
"""Methods that change a tensor, and functions of torch that change those that they are given."""
_COPIES: Final = frozenset({"clone", "cpu", "float", "double", "copy"})

_Aliases = Mapping[str, Sequence[ast.expr]]
"""The targets of loops, and what those go through."""


class Changes:
    """What statements change, also by the functions of the file that they call, and by methods of `self`."""

    def __init__(self, functions: Iterable[Function], calls: Mapping[str, Iterable[str]]) -> None:
        """`calls`: of `calls_between` them."""
        self._calls = calls
        self._changed: dict[str, set[str]] = {}
        self._arguments: dict[str, set[int | str]] = {}
        for each in functions:
            nodes, parameters = nodes_of(each), [arg.arg for arg in each.args.args if arg.arg != "self"]
            own, aliases = names_set_in(each) - {"self"}, aliases_in(nodes)
            changed, names = self._changed.setdefault(each.name, set()), set[str]()
            for node in nodes:
                for whole in _changed_at(node):
                    roots = _roots(whole, aliases)
                    names |= roots
                    if own.isdisjoint(roots):
                        changed |= _words(whole, aliases)
            at: set[int | str] = {at for at, name in enumerate(parameters) if name in names}
            self._arguments.setdefault(each.name, set()).update(at, names & own)

    def by(self, statement: ast.AST, aliases: _Aliases) -> set[str]:
        """The words of the objects that a simple statement sets, changes a part of, or calls a method of for what that
        does: `memory.add(step)`; of others, none.

        `aliases`: see `aliases_in`.
        """
        if not isinstance(statement, _Simple):
            return set()
        nodes = nodes_of(statement)
        words = {word for node in nodes for whole in _changed_at(node) for word in _words(whole, aliases)}
        for function in reachable(called_in(nodes), self._calls):
            words |= self._changed.get(function, set())
        for call in calls_in(statement):
            for at in self._arguments.get(last_name(call), ()):
                if isinstance(at, int):
                    given = call.args[at : at + 1]
                else:
                    given = [each.value for each in call.keywords if each.arg == at]
                words.update(word for each in given for word in words_read(nodes_of(each)))
        return words


def words_read(nodes: Iterable[ast.AST], but: Set[str] = frozenset()) -> Iterator[str]:
    """The words of the objects that are read. What has a method called for what that does is not: `log.write(loss)`.

    Args:
        nodes: all of a part of a tree.
        but: names of objects that do not count.
    """
    nodes = list(nodes)
    no_objects = set[ast.AST]()
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Call(func=function)) | ast.withitem(context_expr=ast.Call(func=function)):
                while isinstance(function, ast.Attribute | ast.Subscript):
                    no_objects.add(function)
                    function = function.value
                no_objects.add(function)
            case ast.Call(func=ast.Attribute(value=whole) as function) if not _is_self(whole):
                no_objects.add(function)
            case _:
                pass
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and node not in no_objects:
            word = node.id if isinstance(node, ast.Name) else node.attr
            if word not in _NO_WORDS and root_of(node) not in but:
                yield word


def aliases_in(nodes: Iterable[ast.AST]) -> dict[str, list[ast.expr]]:
    """The targets of the loops in a part of a tree, and what they are elements of."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        match node:
            case ast.For(target=ast.Tuple(elts=targets), iter=ast.Call(func=ast.Name(id="zip"), args=through)):
                parts = list(zip(targets, through, strict=False))
            case ast.For(target=target, iter=each):
                parts = [(target, each)]
            case _:
                continue
        for part, each in parts:
            for name in nodes_of(part):
                if isinstance(name, ast.Name):
                    found.setdefault(name.id, []).append(each)
    return found


def names_set_in(function: Function) -> set[str]:
    """The arguments of a function, and the names that it sets."""
    nodes = nodes_of(function)
    shared = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    names = {node.id for node in nodes if isinstance(node, ast.Name) and is_set(node)}
    return names - shared | {node.arg for node in nodes if isinstance(node, ast.arg)}


def called_in(nodes: Iterable[ast.AST]) -> set[str]:
    """The names of the functions, and of the methods of `self`, that are called."""
    called = (node.func for node in nodes if isinstance(node, ast.Call))
    return {
        each.id if isinstance(each, ast.Name) else each.attr
        for each in called
        if isinstance(each, ast.Name) or (isinstance(each, ast.Attribute) and _is_self(each.value))
    }


def calls_between(functions: Iterable[Function]) -> dict[str, set[str]]:
    """What each of some functions calls, see `called_in`; those of the same name are one."""
    calls: dict[str, set[str]] = {}
    for each in functions:
        calls.setdefault(each.name, set()).update(called_in(nodes_of(each)))
    return calls


def reachable(names: Iterable[str], calls: Mapping[str, Iterable[str]]) -> set[str]:
    """Functions, and all that they call, or that those call; or names, and all that they are computed from."""
    found, todo = set[str](), list(names)
    while todo:
        each = todo.pop()
        if each not in found:
            found.add(each)
            todo += calls.get(each, ())
    return found


def _changed_at(node: ast.AST) -> Iterator[ast.expr]:
    """What a node sets or changes; not a gradient, nor what only counts."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=whole, attr=method))) if method not in _NO_CHANGE:
            found = [whole]
        case ast.Call(func=ast.Attribute(value=whole, attr=method), args=arguments) if _IN_PLACE.fullmatch(method):
            is_function = method.startswith("_foreach_") or "init" in _chain(whole)
            given: list[ast.expr] = [
                part for each in arguments[:1] for part in nodes_of(each) if isinstance(part, ast.Name)
            ]
            found = given if is_function else [] if _is_copy(whole) else [whole]
        case ast.Call(args=arguments, keywords=named) if last_name(node) == "vector_to_parameters":
            found = [*arguments[1:], *(each.value for each in named if each.arg == "parameters")]
        case ast.Assign(targets=targets):
            parts = (part for target in targets for part in nodes_of(target))
            found = [
                part for part in parts if isinstance(part, ast.Name | ast.Attribute | ast.Subscript) and is_set(part)
            ]
        case ast.AnnAssign(target=target):
            found = [target]
        case ast.AugAssign(target=target, value=value) if not isinstance(value, ast.Constant):
            found = [target]
        case _:
            found = []
    yield from (each for each in found if "grad" not in _chain(each))


def _words(whole: ast.expr, aliases: _Aliases) -> set[str]:
    """The words of an object, and of what a loop takes it from."""
    words = set(_chain(whole))
    for through in aliases.get(root_of(whole), ()):
        words.update(words_read(nodes_of(through)))
    return words - _NO_WORDS


def _roots(whole: ast.expr, aliases: _Aliases) -> set[str]:
    """The name of the object that something is a part of, or those in what a loop takes it from."""
    root = root_of(whole)
    return (
        {each.id for part in aliases[root] for each in nodes_of(part) if isinstance(each, ast.Name)}
        if root in aliases
        else {root}
    )


def _chain(node: ast.expr) -> Iterator[str]:
    """`weight`, `head` and `model` of `model.head.weight[0].view(-1)`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Call):
        if isinstance(node, ast.Attribute):
            yield node.attr
        if isinstance(node, ast.Call):
            node = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        else:
            node = node.value
    if isinstance(node, ast.Name):
        yield node.id


def _is_copy(node: ast.expr) -> bool:
    """Whether it is a view of a copy: `p.detach().clone().abs()`."""
    return any(method_name(call) in _COPIES for call in calls_in(node))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
