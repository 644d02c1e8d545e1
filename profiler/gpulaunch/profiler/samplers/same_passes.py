"""Finds in the source of a program functions that run a network several times on the same input.

    def residual(self, x, t):
        return self.u_t(x, t) + self.u(x, t) * self.u_x(x, t)

where each of the three calls `self.net(x, t)`, as in programs that compute derivatives one by one. One pass gives all
of them. Told are only networks that give the same for the same, see `known_models`, in functions that do nothing but
compute: they set only names, once, and call such networks, each other, and functions that give a result.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gpulaunch.profiler.samplers.known_models import Models
from gpulaunch.profiler.samplers.loops import Function, calls_in, last_name, lines_of
from gpulaunch.profiler.samplers.syntax import dotted, nodes_of

_Statement = ast.Assign | ast.Return

_COMPUTES: Final = (ast.Assign, ast.Return, ast.If)


def lines_of_same_passes(tree: ast.Module, models: Models) -> dict[int, int]:
    """Return the lines of statements that run a network again on the same input, and the first line of each.

    Args:
        tree: of a file.
        models: of it.
    """
    file = _File(tree, models)
    return {line: first for function in file.functions.values() for line, first in file.lines_in(function)}


class _File:
    """Which functions of a file run which networks."""

    def __init__(self, tree: ast.Module, models: Models) -> None:
        functions = [node for node in nodes_of(tree) if isinstance(node, Function)]
        times = Counter(each.name for each in functions)
        self._models = models
        self.functions = {each.name: each for each in functions if times[each.name] == 1 and _only_sets_names(each)}
        """Those that do nothing but compute."""
        while left := [name for name, each in self.functions.items() if not all(map(self._is_known, calls_in(each)))]:
            for name in left:
                del self.functions[name]

    def lines_in(self, function: Function) -> Iterator[tuple[int, int]]:
        """As `lines_of_same_passes`, of one function."""
        made: list[tuple[str, _Statement]] = []
        for statement in _sequence(function):
            for call in calls_in(statement):
                made += ((run, statement) for run in set(self._runs(call, ())))
        times = Counter(run for run, _ in made)
        for run, statement in made:
            if times[run] > 1:
                yield from ((line, statement.lineno) for line in lines_of(statement))

    def _is_known(self, call: ast.Call) -> bool:
        is_gradient = last_name(call) == "grad" and self._models.is_of_package(call.func)
        is_own = self._called(call) is not None or self._models.gives_the_same(call.func)
        return is_gradient or is_own or self._models.only_computes(call)

    def _called(self, call: ast.Call) -> Function | None:
        """The function of the file, or the method of the object itself, that is called."""
        match call.func:
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self.functions.get(name)
            case _:
                return None

    def _runs(self, call: ast.Call, following: Sequence[Function]) -> Iterator[str]:
        """What a call runs, such as `self.net x t`, in the names of the function that it is in."""
        arguments = [dotted(each) for each in call.args]
        if call.keywords or not arguments or not all(arguments):
            return
        if self._models.gives_the_same(call.func):
            yield f"{dotted(call.func)} {' '.join(arguments)}"
        elif (called := self._called(call)) is not None and called not in following:
            names = [each.arg for each in called.args.args if each.arg != "self"]
            given = dict(zip(names, arguments, strict=False))
            for statement in _sequence(called):
                for each in calls_in(statement):
                    for run in self._runs(each, (*following, called)):
                        yield from _translated(run, given)


def _only_sets_names(function: Function) -> bool:
    """Whether a function only gives values to names, each of them once, and returns one."""
    statements = [node for node in nodes_of(function) if isinstance(node, ast.stmt) and node is not function]
    targets = [each for node in statements if isinstance(node, ast.Assign) for each in node.targets]
    names = [name for target in targets for name in (target.elts if isinstance(target, ast.Tuple) else [target])]
    times = Counter(each.id if isinstance(each, ast.Name) else "" for each in names)
    times.update(node.arg for node in nodes_of(function.args) if isinstance(node, ast.arg))
    return all(isinstance(node, _COMPUTES) or _is_text(node) for node in statements) and all(
        name and count == 1 for name, count in times.items()
    )


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _sequence(function: Function) -> Iterator[_Statement]:
    """The statements of a function that each call of it may make, one after the other."""
    return (each for each in function.body if isinstance(each, _Statement))


def _translated(run: str, given: Mapping[str, str]) -> Iterator[str]:
    """What a function runs, in the names of the one that calls it; nothing if that has none for it."""
    network, *arguments = run.split(" ")
    translated = list[str]()
    for each in arguments:
        root, _, rest = each.partition(".")
        if root != "self" and root not in given:
            return
        translated.append(".".join(filter(None, (given.get(root, root), rest))))
    yield " ".join((network, *translated))
