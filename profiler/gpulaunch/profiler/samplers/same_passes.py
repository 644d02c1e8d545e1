"""Finds in the source of a program functions that run a network several times on the same input.

    def residual(self, x, t):
        return self.u_t(x, t) + self.u(x, t) * self.u_x(x, t)

where each of the three calls `self.net(x, t)`, as in programs that compute derivatives one by one. One pass gives all
of them. Told are only networks that give the same for the same, see `known_models`, in functions that change none.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpulaunch.profiler.samplers.changed_objects import calls_between, reachable
from gpulaunch.profiler.samplers.function_bodies import is_set, is_special
from gpulaunch.profiler.samplers.known_models import Models
from gpulaunch.profiler.samplers.loops import BACKWARD, Function, calls_in, last_name, lines_of, word_of
from gpulaunch.profiler.samplers.repeated_passes import CHANGES
from gpulaunch.profiler.samplers.syntax import dotted, nodes_of

_Statement = ast.Assign | ast.Return


def lines_of_same_passes(tree: ast.Module) -> dict[int, int]:
    """Return the lines of statements that run a network again on the same input, and the first line of each.

    Args:
        tree: of a file.
    """
    file = _File(tree)
    return {line: first for function in file.functions.values() for line, first in file.lines_in(function)}


class _File:
    """Which functions of a file run which networks."""

    def __init__(self, tree: ast.Module) -> None:
        functions = [node for node in nodes_of(tree) if isinstance(node, Function)]
        times = Counter(each.name for each in functions)
        calls = calls_between(functions)
        changing = {each.name for each in functions if is_special(each) or any(map(_changes, calls_in(each)))}
        self._models = Models(tree)
        self.functions = {
            each.name: each
            for each in functions
            if times[each.name] == 1 and changing.isdisjoint(reachable([each.name], calls))
        }

    def lines_in(self, function: Function) -> Iterator[tuple[int, int]]:
        """As `lines_of_same_passes`, of one function."""
        made: list[tuple[str, _Statement]] = []
        for statement in _sequence(function.body):
            for call in calls_in(statement):
                made += ((run, statement) for run in set(self._runs(call, function, ())))
        times = Counter(run for run, _ in made)
        for run, statement in made:
            if times[run] > 1:
                yield from ((line, statement.lineno) for line in lines_of(statement))

    def _runs(self, call: ast.Call, within: Function, following: Sequence[Function]) -> Iterator[str]:
        """What a call runs, such as `net(x, t)`, in the names of the function that it is in."""
        word = word_of(call.func)
        arguments = [dotted(each) for each in call.args]
        if not dotted(call.func) or call.keywords or not all(arguments):
            return
        if self._models.gives_the_same(word):
            if arguments and all(_is_set_once(each, within) for each in arguments):
                yield f"{word} {' '.join(arguments)}"
        elif (called := self.functions.get(word)) is not None and called not in following:
            names = [each.arg for each in called.args.args if each.arg != "self"]
            given = dict(zip(names, arguments, strict=False))
            for statement in _sequence(called.body):
                for each in calls_in(statement):
                    for run in self._runs(each, called, (*following, called)):
                        yield from _translated(run, given)


def _changes(call: ast.Call) -> bool:
    return last_name(call) in BACKWARD or CHANGES.fullmatch(last_name(call)) is not None


def _sequence(body: Iterable[ast.stmt]) -> Iterator[_Statement]:
    """The statements of a function that one call of it makes, one after the other."""
    for statement in body:
        if isinstance(statement, ast.Assign | ast.Return):
            yield statement
        elif isinstance(statement, ast.With):
            yield from _sequence(statement.body)


def _is_set_once(argument: str, function: Function) -> bool:
    """Whether a name stands for one object in all of a function."""
    root = argument.partition(".")[0]
    sets = sum(isinstance(node, ast.Name) and node.id == root and is_set(node) for node in nodes_of(function))
    return sets + sum(isinstance(node, ast.arg) and node.arg == root for node in nodes_of(function.args)) <= 1


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
