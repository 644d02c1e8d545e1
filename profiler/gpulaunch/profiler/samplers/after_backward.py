"""Finds in the source of a program the lines that a training loop runs after its backward pass, and that no step needs.

Those above the backward pass may be a part of a loss. Of those below it a step needs what changes gradients before the
optimizer's step, and what the next turn reads above its backward pass, such as a buffer of samples that it draws from.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from gpulaunch.profiler.samplers.changed_objects import Changes, reachable, set_by
from gpulaunch.profiler.samplers.loops import BACKWARD, calls_in, imported_names, last_name, lines_of, method_name
from gpulaunch.profiler.samplers.syntax import dotted, names_in, nodes_of

_Loop = ast.For | ast.While | ast.AsyncFor

_OF_A_STEP: Final = frozenset(
    {
        *("backward", "manual_backward", "step", "zero_grad", "clip_grad_norm_", "clip_grad_value_", "unscale_"),
        *("synchronize", "all_reduce", "barrier", "record_stream"),
    }
)
"""Methods that a training step needs after its backward pass."""


@dataclass(frozen=True)
class _Turn:
    """What runs once for each step: the body of a loop, or a function that such a loop calls."""

    nodes: Sequence[ast.AST]
    sets: frozenset[str]
    """What the loop sets at each turn."""
    steps: frozenset[str]
    """What it calls for a step: `loss.backward`, `self.train_step`."""
    backward: int
    """The last line of the last of these calls."""
    end: int

    @property
    def calls(self) -> Iterator[ast.Call]:
        """All that it calls."""
        return (node for node in self.nodes if isinstance(node, ast.Call))


def functions_that_step(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Return functions that call `backward`, by how they are called, but none with a loop of its own that does:
    `train_step` makes a step, `train_epoch` many. Methods count where they are called on `self`."""
    methods = {each for node in nodes_of(tree) if isinstance(node, ast.ClassDef) for each in node.body}
    found: dict[str, ast.FunctionDef] = {}
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef) and _calls_backward(node):
            loops = (each for each in nodes_of(node) if isinstance(each, _Loop))
            if not any(_calls_backward(loop) for loop in loops):
                found[f"self.{node.name}" if node in methods else node.name] = node
    return found


def makes_step(call: ast.Call, steps: Container[str]) -> bool:
    """Whether a call is a backward pass, or one of `steps`, of `functions_that_step`."""
    return method_name(call) in BACKWARD or ast.unparse(call.func) in steps


def lines_after_backward(tree: ast.Module, steps: Mapping[str, ast.FunctionDef]) -> set[int]:
    """Return the lines of loops below their last `backward`, or call of one of `steps`, and those of such a function
    below its own, without those a step needs.

    Args:
        tree: of a file.
        steps: of `functions_that_step`.
    """
    functions = [node for node in nodes_of(tree) if isinstance(node, ast.FunctionDef)]
    changing = {each.name for each in functions if any(map(_changes_gradient, nodes_of(each)))}
    changes, reads = Changes(tree), _Reads(tree, functions)
    bodies = {name: turn for name, each in steps.items() if (turn := _turn_of(each, ()))}
    read_around = dict[str, set[str]]()
    turns: list[tuple[_Turn, set[str]]] = []
    for loop in nodes_of(tree):
        if isinstance(loop, _Loop) and (turn := _turn_of(loop, steps)):
            called = turn.steps & bodies.keys()
            read = reads.first(turn).union(*(reads.first(bodies[each]) for each in called))
            turns.append((turn, read))
            for each in called:
                read_around.setdefault(each, _returned(steps[each])).update(read)
    turns += [(bodies[each], read) for each, read in read_around.items()]
    found, needed = set[int](), set[int]()
    for turn, read in turns:
        found.update(range(turn.backward + 1, turn.end + 1))
        needed.update(_before_step(turn, changing))
        for node in turn.nodes:
            if isinstance(node, ast.stmt) and (
                isinstance(node, ast.Return) or changes.trained_weights(node) or not read.isdisjoint(changes.by(node))
            ):
                needed.update(lines_of(node))
    return found - needed


def _turn_of(part: _Loop | ast.FunctionDef, steps: Container[str]) -> _Turn | None:
    """The body of a loop or of a function; None: it makes no step."""
    nodes = [each for statement in part.body for each in nodes_of(statement)]
    makes = [node for node in nodes if isinstance(node, ast.Call) and makes_step(node, steps)]
    if not makes:
        return None
    target = nodes_of(part.target) if isinstance(part, ast.For | ast.AsyncFor) else ()
    return _Turn(
        nodes,
        sets=frozenset(filter(None, map(set_by, target))),
        steps=frozenset(ast.unparse(each.func) for each in makes),
        backward=max(map(_end, makes)),
        end=_end(part.body[-1]),
    )


def _before_step(turn: _Turn, changing: Set[str]) -> Iterator[int]:
    """The lines that a step consists of, and all between a backward pass and the step if gradients change there."""
    calls, backward = list(turn.calls), turn.backward
    yield from (line for call in calls if method_name(call) in _OF_A_STEP for line in lines_of(call))
    step = min((call.lineno for call in calls if call.lineno > backward and method_name(call) == "step"), default=0)
    if any(_changes_gradients(node, changing) for node in turn.nodes if backward < getattr(node, "lineno", 0) < step):
        yield from range(backward + 1, step)


def _returned(function: ast.FunctionDef) -> set[str]:
    """What a function returns: its caller may need that."""
    return {name for node in nodes_of(function) if isinstance(node, ast.Return) for name in names_in(node)}


class _Reads:
    """What is read before a backward pass. What is only called, such as a model, or a method for what that does, is not
    read."""

    def __init__(self, tree: ast.Module, functions: Iterable[ast.FunctionDef]) -> None:
        self._modules = {"self", *imported_names(tree)}
        self._in_functions: dict[str, set[str]] = {}
        self._calls: dict[str, set[str]] = {}
        for each in functions:
            own = {*map(set_by, nodes_of(each)), *(every.arg for every in each.args.args)}
            read = {name for name, _ in _loads(nodes_of(each)) if "." in name or name not in own}
            self._in_functions.setdefault(each.name, set()).update(read)
            self._calls.setdefault(each.name, set()).update(map(last_name, calls_in(each)))

    def first(self, turn: _Turn) -> set[str]:
        """What a turn reads above its backward pass before it sets it, `memory`, `self.state`, or what the functions of
        the file read that it calls there."""
        above = [node for node in turn.nodes if getattr(node, "lineno", 0) <= turn.backward]
        set_at = dict.fromkeys(turn.sets, 0)
        for node in above:
            if isinstance(node, ast.expr) and (name := set_by(node)):
                set_at[name] = min(node.lineno, set_at.get(name, node.lineno))
        read = {name for name, line in _loads(above) if line <= set_at.get(name, line)}
        for call in turn.calls:
            if call.lineno <= turn.backward and ast.unparse(call.func) not in turn.steps:
                for function in reachable(last_name(call), self._calls):
                    read |= self._in_functions.get(function, set())
        return read - self._modules


def _loads(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """The names that are read, and on which lines."""
    called = set[ast.AST]()
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Call(func=function)) | ast.withitem(context_expr=ast.Call(func=function)):
                called.update(nodes_of(function))
            case ast.Call(func=function):
                called.add(function)
            case _:
                pass
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = "" if node in called else dotted(node)
            if name:
                yield name, node.lineno


def _changes_gradients(node: ast.AST, changing: Set[str]) -> bool:
    """Whether it changes gradients, or calls a function of the file that does, or one that clips them by its name."""
    if _changes_gradient(node):
        return True
    name = last_name(node) if isinstance(node, ast.Call) else ""
    return name in changing or ("clip" in name and "grad" in name and name not in _OF_A_STEP)


def _changes_gradient(node: ast.AST) -> bool:
    """Whether it sets or changes a gradient: `p.grad = flat[:n]`, `p.grad.mul_(0.5)`; not if it clears one."""
    match node:
        case ast.Assign(targets=targets, value=value):
            is_none = isinstance(value, ast.Constant) and value.value is None
            return not is_none and any(map(_is_gradient, targets))
        case ast.AugAssign(target=target):
            return _is_gradient(target)
        case ast.Call(func=ast.Attribute(value=value, attr=method)):
            return method.endswith("_") and method != "zero_" and _is_gradient(value)
        case _:
            return False


def _is_gradient(node: ast.expr) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Attribute) and node.attr == "grad"


def _calls_backward(node: ast.AST) -> bool:
    return any(method_name(call) in BACKWARD for call in calls_in(node))


def _end(node: ast.expr | ast.stmt) -> int:
    return node.end_lineno or node.lineno
