"""What the statements of a function do, by the words of the source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Final

from gpulaunch.profiler.samplers.loops import BACKWARD, Function, calls_in, last_name, lines_of, word_of
from gpulaunch.profiler.samplers.syntax import nodes_of, root_of, words_in
from gpulaunch.profiler.samplers.tensor_functions import COMPUTE, FILLS, ROOM

_REFUSED: Final = frozenset({"out", "generator", "requires_grad"})
"""Arguments with which a function does something else."""
_NO_GRADIENTS: Final = frozenset({"no_grad", "inference_mode"})
_SHARES: Final = frozenset({"data", "detach"})
"""What gives a buffer the memory of a parameter."""


def changed_by(node: ast.AST) -> Iterator[str]:
    """Names of objects that a part of a function changes: `mask[0] = 1`, `mask.tril_()`, `out=mask`, `mask += 1`."""
    match node:
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()) | ast.Attribute(value=value, ctx=ast.Store()):
            yield root_of(value)
        case ast.Call(func=ast.Attribute(value=ast.Call() as made, attr=method)) if (
            method in FILLS and last_name(made) in ROOM | COMPUTE
        ):
            pass  # what is filled has no name yet
        case ast.Call(func=ast.Attribute(value=value, attr=method), args=args) if method.endswith("_"):
            yield from map(root_of, (value, *args))
        case ast.keyword(arg="out", value=value) | ast.AugAssign(target=value):
            yield root_of(value)
        case _:
            pass


def statements_in(body: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """All statements of a body and of the blocks in it; not those of functions and classes in it."""
    for part in body:
        if isinstance(part, Function | ast.ClassDef):
            continue
        if isinstance(part, ast.stmt):
            yield part
        blocks = (ast.stmt, ast.ExceptHandler, ast.match_case)
        yield from statements_in(each for each in ast.iter_child_nodes(part) if isinstance(each, blocks))


def arguments_of(function: Function) -> set[str]:
    """The names of the arguments of a function, `self` included."""
    return {node.arg for node in nodes_of(function.args) if isinstance(node, ast.arg)}


def inits_of(of: ast.ClassDef) -> list[ast.FunctionDef]:
    """The methods `__init__` of a class: one, or none."""
    return [each for each in of.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]


def optimizers_in(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """The classes of a file that are optimizers of torch."""
    for node in nodes_of(tree):
        if isinstance(node, ast.ClassDef) and any(word_of(base) == "Optimizer" for base in node.bases):
            yield node


def is_special(function: Function) -> bool:
    """Whether what a function does may not be all that its statements say: a generator, or one that trains."""
    kinds = ast.Yield | ast.YieldFrom | ast.Await | ast.Global | ast.Nonlocal
    if isinstance(function, ast.AsyncFunctionDef) or any(isinstance(node, kinds) for node in nodes_of(function)):
        return True
    loops = (node for node in nodes_of(function) if isinstance(node, ast.For | ast.While))
    return any(last_name(call) in BACKWARD for loop in loops for call in calls_in(loop))


def registered_buffer(statement: ast.stmt) -> str:
    """The buffer that a statement registers, if it has memory of its own."""
    match statement:
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(value=str(name)), value, *_])
        ):
            shares = any(isinstance(node, ast.Attribute) and node.attr in _SHARES for node in nodes_of(value))
            return "" if shares else name
        case _:
            return ""


def is_plain_call(call: ast.Call) -> bool:
    """Whether a call has none of the arguments with which a function does something else."""
    return all(each.arg is not None and each.arg not in _REFUSED for each in call.keywords)


def is_set(node: ast.Name | ast.Attribute | ast.Subscript) -> bool:
    """Whether a name, an attribute or a part is given a value, or deleted."""
    return not isinstance(node.ctx, ast.Load)


def is_without_gradients(context: ast.expr) -> bool:
    """Whether a context, or a decorator, is `torch.no_grad()` or the like."""
    return not _NO_GRADIENTS.isdisjoint(words_in(context))


def lines_without_gradients(tree: ast.Module) -> set[int]:
    """The lines inside `with torch.no_grad():` and the like, or in a function that it decorates."""
    found: set[int] = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.With):
            around: list[ast.expr] = [item.context_expr for item in node.items]
        elif isinstance(node, ast.FunctionDef):
            around = node.decorator_list
        else:
            continue
        if any(map(is_without_gradients, around)):
            found.update(lines_of(node))
    return found
