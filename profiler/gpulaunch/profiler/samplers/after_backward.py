"""Finds in the source of a program the lines that a training loop runs after its backward pass, and that no step needs.

Those above the backward pass may be a part of a loss. Of those below it a step needs what changes gradients before the
optimizer's step, and what the next turn reads above its backward pass, such as a buffer of samples that it draws from.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from gpulaunch.profiler.samplers.changed_objects import (
    Changes,
    aliases_in,
    called_in,
    calls_between,
    names_set_in,
    reachable,
    words_read,
)
from gpulaunch.profiler.samplers.loops import (
    BACKWARD,
    Function,
    calls_in,
    imported_names,
    last_name,
    lines_of,
    method_name,
)
from gpulaunch.profiler.samplers.syntax import dotted, nodes_of

_Loop = ast.For | ast.While | ast.AsyncFor
_Ends = ast.Return | ast.Break | ast.Continue | ast.Raise

_OF_A_STEP: Final = frozenset(
    {
        *("backward", "manual_backward", "step", "zero_grad", "clip_grad_norm_", "clip_grad_value_", "unscale_"),
        *("synchronize", "all_reduce", "barrier", "record_stream", "first_step", "second_step"),
    }
)
"""Methods that a training step needs after its backward pass."""
_SAMPLERS: Final = frozenset({"sampler", "batch_sampler"})
"""Arguments of a loader."""


@dataclass(frozen=True)
class _Turn:
    """What runs once for each step: the body of a loop, or a function that such a loop calls."""

    head: Sequence[ast.AST]
    """What a loop goes through, or its condition."""
    nodes: Sequence[ast.AST]
    sets: frozenset[str]
    """What the loop sets at each turn."""
    makes: Sequence[ast.Call]
    """What it calls for a step."""
    backward: int
    """The last line of the last of these calls."""
    end: int

    @property
    def steps(self) -> set[str]:
        """The functions that it calls for a step."""
        return {dotted(each.func) for each in self.makes}


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
    return method_name(call) in BACKWARD or dotted(call.func) in steps


def lines_after_backward(tree: ast.Module, steps: Mapping[str, ast.FunctionDef]) -> set[int]:
    """Return the lines of loops below their last `backward`, or call of one of `steps`, and those of such a function
    below its own, without those a step needs.

    Args:
        tree: of a file.
        steps: of `functions_that_step`.
    """
    loops = [turn for node in nodes_of(tree) if isinstance(node, _Loop) and (turn := _turn_of(node, steps))]
    if not loops:
        return set()
    functions = [node for node in nodes_of(tree) if isinstance(node, Function)]
    changing = {each.name for each in functions if any(map(_changes_gradient, nodes_of(each)))}
    calls = calls_between(functions)
    changes = Changes(functions, calls)
    reads = _Reads(functions, calls, imported_names(tree).keys(), _sampled_by(tree))
    bodies = {name: turn for name, each in steps.items() if (turn := _turn_of(each, steps.keys() - {name}))}
    read_inside = {name: reads.above(turn) for name, turn in bodies.items()}
    read_around = dict[str, set[str]]()
    turns: list[tuple[_Turn, set[str]]] = []
    for turn in loops:
        called = turn.steps & bodies.keys()
        read = reads.above(turn).union(*(read_inside[each] for each in called))
        turns.append((turn, read))
        for each in called:
            read_around.setdefault(each, set()).update(read)
    turns += [(bodies[each], read) for each, read in read_around.items()]
    found, needed = set[int](), set[int]()
    for turn, read in turns:
        found.update(range(turn.backward + 1, turn.end + 1))
        needed.update(_before_step(turn, changing))
        needed.update(_for_next(turn, read, changes, reads))
    return found - needed


def _turn_of(part: _Loop | ast.FunctionDef, steps: Container[str]) -> _Turn | None:
    """The body of a loop or of a function; None: it makes no step."""
    nodes = [each for statement in part.body for each in nodes_of(statement)]
    makes = [node for node in nodes if isinstance(node, ast.Call) and makes_step(node, steps)]
    if not makes:
        return None
    target = nodes_of(part.target) if isinstance(part, ast.For | ast.AsyncFor) else ()
    head = part.test if isinstance(part, ast.While) else part.iter if isinstance(part, _Loop) else None
    return _Turn(
        head=() if head is None else nodes_of(head),
        nodes=nodes,
        sets=frozenset(each.id for each in target if isinstance(each, ast.Name)),
        makes=makes,
        backward=max(map(_end, makes)),
        end=_end(part.body[-1]),
    )


def _before_step(turn: _Turn, changing: Set[str]) -> Iterator[int]:
    """The lines that a step consists of, and all between a backward pass and the step if gradients change there."""
    calls, backward = [node for node in turn.nodes if isinstance(node, ast.Call)], turn.backward
    yield from (line for call in calls if method_name(call) in _OF_A_STEP for line in lines_of(call))
    step = min((call.lineno for call in calls if call.lineno > backward and method_name(call) == "step"), default=0)
    if any(_changes_gradients(node, changing) for node in turn.nodes if backward < getattr(node, "lineno", 0) < step):
        yield from range(backward + 1, step)


def _for_next(turn: _Turn, read: Set[str], changes: Changes, reads: _Reads) -> Iterator[int]:
    """The lines below the backward pass of statements that change what is read above one, that return something or end
    the loop, and of those that set what these need."""
    below = [node for node in turn.nodes if isinstance(node, ast.stmt) and node.lineno > turn.backward]
    aliases = aliases_in(turn.nodes)
    changed = [(node, changes.by(node, aliases)) for node in below]
    needed = {node for node, words in changed if isinstance(node, _Ends) or not read.isdisjoint(words)}
    todo = list(needed)
    while todo:
        need = reads.words(nodes_of(todo.pop()))
        more = {
            node
            for node, words in changed
            if node not in needed and not isinstance(node, ast.Expr) and not need.isdisjoint(words)
        }
        needed |= more
        todo += more
    for node in below:
        if node in needed:
            yield from lines_of(node)
        elif isinstance(node, ast.For | ast.While | ast.If) and not needed.isdisjoint(nodes_of(node)):
            yield from lines_of(node.iter if isinstance(node, ast.For) else node.test)


class _Reads:
    """What is read before a backward pass."""

    def __init__(
        self,
        functions: Iterable[Function],
        calls: Mapping[str, Iterable[str]],
        imported: Set[str],
        sampled_by: Set[str],
    ) -> None:
        self._calls = calls
        self._imported = imported
        self._sampled_by = sampled_by - imported
        self._in_functions: dict[str, set[str]] = {}
        for each in functions:
            read = set(words_read(nodes_of(each), names_set_in(each) - {"self"}))
            self._in_functions.setdefault(each.name, set()).update(read)

    def words(self, nodes: Iterable[ast.AST], but: Set[str] = frozenset()) -> set[str]:
        """The words of the objects that are read; `but`: names of some that do not count."""
        return set(words_read(nodes, but)) - self._imported

    def above(self, turn: _Turn) -> set[str]:
        """The words of what a turn reads above its backward pass before it sets it, `memory`, `self.state`, and of what
        the functions of the file read that it calls there."""
        given = {each for call in turn.makes for each in call.args if dotted(each)}  # it may only pass them on
        nodes = [*turn.head, *(node for node in turn.nodes if getattr(node, "lineno", 0) <= turn.backward)]
        nodes = [node for node in nodes if node not in given]
        words = self.words(nodes, _set_first(nodes, turn.sets)) | self._sampled_by
        for function in reachable(called_in(nodes), self._calls):
            words |= self._in_functions.get(function, set()) - self._imported
        return words


def _sampled_by(tree: ast.Module) -> set[str]:
    """The words of the samplers that loaders are given, and of what those are made of, as the weights of samples: who
    goes through a loader reads them under its name."""
    nodes = nodes_of(tree)
    samplers = (
        each.value
        for node in nodes
        if isinstance(node, ast.Call) and last_name(node).endswith("Loader")
        for each in node.keywords
        if each.arg in _SAMPLERS
    )
    found = {word for each in samplers for word in words_read(nodes_of(each))}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name() | ast.Attribute() as target], value=ast.Call() as made):
                if dotted(target).rpartition(".")[2] in found:
                    found = found.union(words_read(nodes_of(made)))
            case _:
                pass
    return found


def _set_first(nodes: Sequence[ast.AST], sets: Set[str]) -> set[str]:
    """The names that a turn sets, in any case, before it reads them; `sets`: by its loop."""
    depends = {each for node in nodes if isinstance(node, ast.If) for each in nodes_of(node)}
    set_at = dict.fromkeys(sets, 0)
    for node in nodes:
        match node:
            case ast.Assign(targets=targets):
                parts, line = targets, _end(node) + 1
            case ast.For(target=target) | ast.comprehension(target=target) | ast.NamedExpr(target=target):
                parts, line = [target], target.lineno
            case ast.withitem(optional_vars=ast.expr() as target):
                parts, line = [target], target.lineno
            case _:
                continue
        if node not in depends:
            for name in (each.id for part in parts for each in nodes_of(part) if isinstance(each, ast.Name)):
                set_at[name] = min(line, set_at.get(name, line))
    loads = (node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return set_at.keys() - {node.id for node in loads if node.lineno < set_at.get(node.id, 0)}


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
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
        node = node.value
    return isinstance(node, ast.Attribute) and node.attr in ("grad", "_grad")


def _calls_backward(node: ast.AST) -> bool:
    return any(method_name(call) in BACKWARD for call in calls_in(node))


def _end(node: ast.expr | ast.stmt) -> int:
    return node.end_lineno or node.lineno
