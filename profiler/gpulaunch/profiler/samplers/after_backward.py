"""Finds in the source of a program the lines that a training loop runs after its backward pass, and that no step needs.

Those above the backward pass may be a part of a loss. Of those below it a step needs what changes gradients before the
optimizer's step, and what the next turn reads above its backward pass, such as a buffer of samples that it draws from.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

from gpulaunch.profiler.samplers.loops import BACKWARD, calls_in, imported_names, last_name, lines_of, method_name
from gpulaunch.profiler.samplers.syntax import dotted, nodes_of, root_of

_Loop = ast.For | ast.While | ast.AsyncFor

_OF_A_STEP: Final = frozenset(
    {
        *("backward", "manual_backward", "step", "zero_grad", "clip_grad_norm_", "clip_grad_value_", "unscale_"),
        *("synchronize", "all_reduce", "barrier", "record_stream"),
    }
)
"""Methods that a training step needs after its backward pass."""


def functions_that_step(tree: ast.Module) -> Iterator[str]:
    """How functions that call `backward` are called, but not one with a loop of its own: `train_step` makes a step,
    `train_epoch` many. Methods count where they are called on `self`."""
    methods = {each for node in nodes_of(tree) if isinstance(node, ast.ClassDef) for each in node.body}
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef) and _calls_backward(node):
            loops = (each for each in nodes_of(node) if isinstance(each, _Loop))
            if not any(_calls_backward(loop) for loop in loops):
                yield f"self.{node.name}" if node in methods else node.name


def makes_step(call: ast.Call, steps: Set[str]) -> bool:
    """Whether a call is a backward pass, or one of `steps`, of `functions_that_step`."""
    return method_name(call) in BACKWARD or (bool(steps) and ast.unparse(call.func) in steps)


def lines_after_backward(tree: ast.Module, steps: Set[str]) -> set[int]:
    """Return the lines of loops below their last `backward`, or call of one of `steps`, without those a step needs.

    Args:
        tree: of a file.
        steps: of `functions_that_step`.
    """
    functions = [node for node in nodes_of(tree) if isinstance(node, ast.FunctionDef)]
    changing = {each.name for each in functions if any(map(_changes_gradient, nodes_of(each)))}
    changed = {each.name: set(_changed_parameters(each)) for each in functions}
    modules = {"self", *imported_names(tree)}
    found, needed = set[int](), set[int]()
    for loop in nodes_of(tree):
        if isinstance(loop, _Loop):
            nodes = [each for statement in loop.body for each in nodes_of(statement)]
            calls = [node for node in nodes if isinstance(node, ast.Call)]
            backward = max((_end(node) for node in calls if makes_step(node, steps)), default=None)
            if backward is not None:
                found.update(range(backward + 1, _end(loop.body[-1]) + 1))
                needed.update(_before_step(nodes, calls, backward, changing))
                needed.update(_read_by_next(loop, nodes, backward, modules, changed))
    return found - needed


def _before_step(
    nodes: Sequence[ast.AST], calls: Sequence[ast.Call], backward: int, changing: Set[str]
) -> Iterator[int]:
    """The lines that a step consists of, and all between a backward pass and the step if gradients change there."""
    yield from (line for call in calls if method_name(call) in _OF_A_STEP for line in lines_of(call))
    step = min((call.lineno for call in calls if call.lineno > backward and method_name(call) == "step"), default=0)
    if any(_changes_gradients(node, changing) for node in nodes if backward < getattr(node, "lineno", 0) < step):
        yield from range(backward + 1, step)


def _read_by_next(
    loop: _Loop, nodes: Sequence[ast.AST], backward: int, modules: Set[str], changed: Mapping[str, Set[int]]
) -> Iterator[int]:
    """The lines of statements that set or change what the next turn reads above its backward pass.

    Args:
        loop: the loop.
        nodes: of its body.
        backward: the last line of its backward pass.
        modules: names that stand for no object of the program's own.
        changed: of functions of the file, the arguments that they change.
    """
    read = _read_first(loop, nodes, backward) - modules
    for node in nodes:
        if isinstance(node, ast.stmt) and not read.isdisjoint(_changed_by(node, changed)):
            yield from lines_of(node)


def _read_first(loop: _Loop, nodes: Iterable[ast.AST], backward: int) -> set[str]:
    """What a turn reads above its backward pass before it sets it: `memory`, `self.state`. What it only calls, such as
    a model, or a method for what that does, is not read."""
    called = set[ast.AST]()
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Call(func=function)) | ast.withitem(context_expr=ast.Call(func=function)):
                called.update(nodes_of(function))
            case ast.Call(func=function):
                called.add(function)
            case _:
                pass
    turns = () if isinstance(loop, ast.While) else nodes_of(loop.target)
    set_at: dict[str, int] = {name: 0 for part in turns if (name := _set(part))}
    reads: list[tuple[str, int]] = []
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and node.lineno <= backward and (name := dotted(node)):
            if isinstance(node.ctx, ast.Store):
                set_at[name] = min(node.lineno, set_at.get(name, node.lineno))
            elif node not in called:
                reads.append((name, node.lineno))
    return {name for name, line in reads if line <= set_at.get(name, line)}


def _set(node: ast.AST) -> str:
    return dotted(node) if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store) else ""


def _changed_parameters(function: ast.FunctionDef) -> Iterator[int]:
    """Which of its arguments a function changes: it calls a method of it for what that does, or sets a part of it."""
    names = [each.arg for each in function.args.args]
    for node in nodes_of(function):
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=whole))):
                name = root_of(whole, views=False)
            case ast.Attribute(value=whole, ctx=ast.Store()) | ast.Subscript(value=whole, ctx=ast.Store()):
                name = root_of(whole, views=False)
            case _:
                continue
        if name in names:
            yield names.index(name)


def _changed_by(statement: ast.stmt, changed: Mapping[str, Set[int]]) -> Iterator[str]:
    """What a statement sets, or calls a method of for what that does: `memory.add(step)`; or gives to a function of
    the file that changes it."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=arguments)):
            yield from (dotted(each) for at, each in enumerate(arguments) if at in changed.get(name, ()))
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=whole))):
            yield dotted(whole)
        case ast.Assign(targets=targets):
            yield from (_set(part) for target in targets for part in nodes_of(target))
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            yield _set(target)
        case _:
            pass


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
