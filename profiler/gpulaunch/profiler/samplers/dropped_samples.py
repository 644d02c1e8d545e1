"""Finds in the source of an iterable dataset what it prepares of samples that other ranks or workers keep.

    for number, picture in enumerate(self.pictures):
        pixels = decode(picture)
        if number % world_size != rank:
            continue
        yield pixels

Only where all that the loop does before is known: it counts, leaves samples out, and prepares them.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from gpulaunch.profiler.samplers.function_bodies import is_set, statements_in
from gpulaunch.profiler.samplers.loops import calls_in, last_name, lines_of, word_of
from gpulaunch.profiler.samplers.sample_expressions import Expressions, Scope
from gpulaunch.profiler.samplers.sample_parts import Parts
from gpulaunch.profiler.samplers.syntax import dotted, names_in, names_set, nodes_of, times_read, words_in


def lines_of_dropped_samples(tree: ast.Module) -> dict[int, str]:
    """Return the lines of statements that prepare samples some of which are dropped, each with one of
    `record.line_calls`: whose they are.

    Args:
        tree: of a file.
    """
    nodes = nodes_of(tree)
    if not any(isinstance(node, ast.Mod) for node in nodes) and "islice" not in words_in(tree):
        return {}
    file = _File(tree)
    found: dict[int, str] = {}
    for function in (node for node in nodes if isinstance(node, ast.FunctionDef) and not _has_other_ends(node)):
        for loop in _loops_in(function):
            found |= file.of_loop(loop, function)
        for call in calls_in(function):
            if last_name(call) == "islice" and (whose := file.slices(call)):
                found |= dict.fromkeys(file.lines_of_source(call.args[0]), whose)
    return found


class _File:
    """What the functions of a file do with samples."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = nodes_of(tree)
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and not node.decorator_list]
        used = (node for node in nodes if isinstance(node, ast.Attribute | ast.Name) and not is_set(node))
        words = Counter(map(word_of, used))
        self._used_once = {each.name: each for each in functions if words[each.name] == 1}
        self._expressions, self._parts = Expressions(tree), Parts(tree)

    def of_loop(self, loop: ast.For, function: ast.FunctionDef) -> dict[int, str]:
        """The lines of a loop, and of a generator that it takes the samples from, that prepare what the loop drops."""
        for at in range(len(loop.body)):
            if whose := self._drops(loop, at):
                lines = list(self._prepared(loop, function, at)) if self._is_known_before(loop, at) else []
                samples = names_in(loop.target) - _numbers_of(loop)
                if at == 0 and samples.isdisjoint(_needed_by_others(function, loop, at)):
                    lines += self.lines_of_source(loop.iter)
                return dict.fromkeys(lines, whose)
        return {}

    def _drops(self, loop: ast.For, at: int) -> str:
        """Whose samples a statement of a loop drops by their number; empty: it does not."""
        statement, then = loop.body[at], loop.body[at + 1 :]
        if not isinstance(statement, ast.If) or statement.orelse:
            return ""
        match statement.test:
            case ast.BoolOp(
                ast.And(), [ast.Compare(_, [ast.Gt()], [ast.Constant(value=1)]), ast.Compare() as compared]
            ) | (ast.Compare() as compared):
                pass  # `number % world_size != rank`, also after `world_size > 1 and`
            case _:
                return ""
        *before, last = statement.body
        leaves_out = isinstance(compared.ops[0], ast.NotEq) and isinstance(last, ast.Continue)
        leaves_out = leaves_out and all(map(_is_count, before))
        keeps = isinstance(compared.ops[0], ast.Eq) and all(map(_is_count, then)) and any(map(_yielded, statement.body))
        by_number = any(_is_modulo(side, _numbers_of(loop)) for side in (compared.left, *compared.comparators))
        return self._parts.whose(compared) if by_number and (leaves_out or keeps) else ""

    def slices(self, call: ast.Call) -> str:
        """As `_drops`, of `islice(samples, rank, None, world_size)`."""
        match call.args:
            case [_, first, ast.Constant(value=None), ast.Name() | ast.Attribute() | ast.BinOp() | ast.Call()]:
                return self._parts.whose(first)
            case _:
                return ""

    def lines_of_source(self, iterated: ast.expr) -> Iterator[int]:
        """The lines that prepare a sample in the generator of the file from which alone a loop has its samples."""
        while isinstance(iterated, ast.Call) and last_name(iterated) == "enumerate" and iterated.args:
            iterated = iterated.args[0]
        name = dotted(iterated.func).removeprefix("self.") if isinstance(iterated, ast.Call) else ""
        function = self._used_once.get(name)
        if function is None or _has_other_ends(function):
            return
        if sum(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes_of(function)) != 1:
            return
        for loop in _loops_in(function):
            last = len(loop.body) - 1
            value = _yielded(loop.body[last])
            if value is not None and self._is_known_before(loop, last):
                yield from self._prepared(loop, function, last)
                if any(calls_in(value)) and self._expressions.is_known(value, _scope_of(loop, last)):
                    yield from lines_of(loop.body[last])

    def _prepared(self, loop: ast.For, function: ast.FunctionDef, at: int) -> Iterator[int]:
        """The lines of a loop that prepare samples before they are dropped, or handed out, if all of their results are
        used only of samples that are kept."""
        before = [each for each in loop.body[:at] if isinstance(each, ast.Assign)]
        names = set[str]().union(*map(names_set, before))
        if names.isdisjoint(_needed_by_others(function, loop, at)):
            for statement in before:
                if any(calls_in(statement.value)):
                    yield from lines_of(statement)

    def _is_known_before(self, loop: ast.For, at: int) -> bool:
        """Whether all statements of a loop before another one only prepare a sample, count, or leave samples out."""
        scope = _scope_of(loop, at)
        for each in loop.body[:at]:
            match each:
                case ast.Assign(value=value):
                    if not names_set(each) or not self._expressions.is_known(value, scope):
                        return False
                case ast.If(test=test, body=[ast.Continue()], orelse=[]):
                    if self._parts.whose(test) or not self._expressions.is_known(test, scope):
                        return False
                case _:
                    if not _is_count(each):
                        return False
        return True


def _has_other_ends(function: ast.FunctionDef) -> bool:
    """Whether a function says what to do at an error, which all ranks may have to meet, or sets names of others."""
    kinds = ast.ExceptHandler | ast.Global | ast.Nonlocal
    return "suppress" in words_in(function) or any(isinstance(node, kinds) for node in nodes_of(function))


def _loops_in(function: ast.FunctionDef) -> Iterator[ast.For]:
    return (each for each in statements_in(function.body) if isinstance(each, ast.For))


def _yielded(statement: ast.stmt) -> ast.expr | None:
    match statement:
        case ast.Expr(value=ast.Yield(value=value)):
            return value
        case _:
            return None


def _is_count(statement: ast.stmt) -> bool:
    """`number += 1`."""
    match statement:
        case ast.AugAssign(target=ast.Name(), value=ast.Constant()):
            return True
        case _:
            return False


def _numbers_of(loop: ast.For) -> set[str]:
    """The names that count the turns of a loop."""
    counts = {name for each in loop.body if _is_count(each) for name in names_in(each)}
    match loop.target, loop.iter:
        case ast.Tuple(elts=[ast.Name(id=number), *_]), ast.Call(func=ast.Name(id="enumerate")):
            counts.add(number)
        case ast.Name(id=number), ast.Call(func=ast.Name(id="range")):
            counts.add(number)
        case _:
            pass
    return counts


def _is_modulo(side: ast.expr, numbers: set[str]) -> bool:
    """`number % world_size`."""
    match side:
        case ast.BinOp(ast.Name(number), ast.Mod()):
            return number in numbers
        case _:
            return False


def _scope_of(loop: ast.For, at: int) -> Scope:
    names = names_in(loop.target)
    for each in loop.body[:at]:
        if isinstance(each, ast.Assign) and not names.isdisjoint(names_in(each.value)):
            names |= names_set(each)
    return Scope(frozenset(names), frozenset(_numbers_of(loop)))


def _needed_by_others(function: ast.FunctionDef, loop: ast.For, at: int) -> set[str]:
    """The names that a function reads elsewhere than to prepare the samples of a loop before one of its statements, and
    in what that does with those that are kept; or that a turn may read before it sets them: they are of another one."""
    statement = loop.body[at]
    kept = [*loop.body[at + 1 :], *(statement.body if isinstance(statement, ast.If) else [statement])]
    prepares = [each for each in loop.body[:at] if isinstance(each, ast.Assign)]
    inside = {node for part in (*prepares, *kept) for node in nodes_of(part)}
    needed = set(times_read(node for node in nodes_of(function) if node not in inside))
    known = names_in(loop.target)
    for each in loop.body:
        needed |= times_read(nodes_of(each)).keys() - known
        known |= names_set(each)
    return needed
