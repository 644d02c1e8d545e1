"""Finds in the source of a program the loops that one operation on a whole batch could replace.

Not those that make steps, that only move or collect tensors, that go through the parts of a model or a few things that
the source names, that hand out batches, or whose turns need each other. The words of the source decide; what they mean
is not known: where that leaves a doubt, a loop is left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from gpulaunch.profiler.samplers.loop_turns import Loop, parts_of, turns_need_each_other
from gpulaunch.profiler.samplers.syntax import dotted, nodes_of

Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = Function | ast.ClassDef

BACKWARD: Final = frozenset({"backward", "manual_backward"})
"""Functions that run a backward pass."""
_MOST_NODES: Final = 2000
"""Of the tree of a loop: longer ones are not read."""
_FEW: Final = 9
"""Turns that are no batch, but the heads or scales of a model."""
WRAPS: Final = frozenset({"enumerate", "zip", "reversed", "sorted", "list", "tuple", "tqdm"})
"""Functions that a loop goes through what they are given."""
_TAKES_ALL: Final = frozenset({"sum", "max", "min", "list", "tuple", "stack", "cat", "reduce"})
"""Functions that take all of a generator or `map` at once: others may hand out its batches one by one."""
_REDUCES: Final = frozenset(
    {"add", "mul", "maximum", "minimum", "logaddexp", "logaddexp2", "logical_and", "logical_or"}
)
"""What `functools.reduce` may be given in any order, and torch does for a whole batch at once."""
_OF_THE_MODEL: Final = re.compile(
    r"(?:\w+_)?(?:parameters|params|buffers|weights|grads|gradients|modules|children|layers|blocks)|param_groups"
    r"|state_dict"
)
"""Names of the parts of a model, which differ in shape or need each other."""
MOVES: Final = frozenset(
    {
        *("to", "cuda", "cpu", "pin_memory", "detach", "clone", "contiguous", "item", "tolist", "numpy", "float"),
        *("append", "extend", "items", "keys", "values", "get", "update", "size", "len", "range", "zip", "enumerate"),
        *("isinstance", "tuple", "list", "dict", "set", "reversed", "sorted", "print", "type", "int", "str", "hasattr"),
        "long",
    }
)
"""Functions and methods that compute nothing with tensors."""


def loops_of(tree: ast.Module, makes_steps: Callable[[Loop], bool]) -> dict[int, tuple[range, ...]]:
    """Return the lines of each loop that a line is in, the outermost first; within the line's own function.

    Args:
        tree: of a file.
        makes_steps: whether a loop makes training steps.
    """
    found: dict[int, tuple[range, ...]] = {}
    taken: set[int] = set()
    todo: list[tuple[ast.AST, tuple[range, ...], bool]] = [(tree, (), True)]
    while todo:
        node, around, counts = todo.pop()
        if isinstance(node, ast.Call) and last_name(node) in _TAKES_ALL:
            taken.update(id(each) for each in node.args)
        elif isinstance(node, ast.Starred):
            taken.add(id(node.value))
        if isinstance(node, _Scope):
            around, counts = (), not isinstance(node, Function) or not _hands_out(node)
            found.update(dict.fromkeys(lines_of(node), around))
        elif isinstance(node, Loop | ast.Call) and counts and _is_told(node, id(node) in taken, makes_steps):
            around = (*around, lines_of(node))
            found.update(dict.fromkeys(lines_of(node), around))
        todo += ((child, around, counts) for child in ast.iter_child_nodes(node))
    return {line: loops for line, loops in found.items() if loops}


def _is_told(node: Loop | ast.Call, is_taken: bool, makes_steps: Callable[[Loop], bool]) -> bool:
    if isinstance(node, ast.Call):
        return _is_reduced(node) or (is_taken and _is_mapped(node))
    return (is_taken or not isinstance(node, ast.GeneratorExp)) and _is_of_elements(node) and not makes_steps(node)


def lines_of(node: ast.stmt | ast.expr) -> range:
    """The numbers of the lines that a part of a tree is on."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """All calls in a part of a tree."""
    return (each for each in nodes_of(node) if isinstance(each, ast.Call))


def _hands_out(function: Function) -> bool:
    """Whether it is a generator, such as one of batches, or waits for other tasks."""
    if isinstance(function, ast.AsyncFunctionDef):
        return True
    todo: list[ast.AST] = [*function.body]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, _Scope | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return False


def _is_of_elements(loop: Loop) -> bool:
    """Whether it computes something for each of many elements, none of which needs another one."""
    if len(nodes_of(loop)) > _MOST_NODES:
        return False
    iterated = [loop.iter] if isinstance(loop, ast.For) else [each.iter for each in loop.generators]
    return all(map(is_batch, iterated)) and _computes(parts_of(loop)) and not turns_need_each_other(loop)


def _is_mapped(call: ast.Call) -> bool:
    """Whether it is `map` with a function that may compute something with each of many elements."""
    if last_name(call) != "map" or len(call.args) < 2:
        return False
    function, *iterated = call.args
    if not all(map(is_batch, iterated)):
        return False
    return _computes([function.body]) if isinstance(function, ast.Lambda) else word_of(function) not in {"", *MOVES}


def _is_reduced(call: ast.Call) -> bool:
    """Whether it is `functools.reduce` with a function that does not need an order."""
    if last_name(call) != "reduce" or len(call.args) < 2 or word_of(call.args[0]) not in _REDUCES:
        return False
    return is_batch(call.args[1])


def is_batch(iterated: ast.expr) -> bool:
    """Whether a loop goes through what may be many, and is not the parts of a model."""
    return not _is_few(iterated) and not _is_of_model(iterated)


def _computes(parts: Iterable[ast.AST]) -> bool:
    """Whether anything in parts of a tree may be an operation with tensors."""
    nodes = [node for part in parts for node in nodes_of(part)]
    calls = (last_name(node) for node in nodes if isinstance(node, ast.Call))
    return any(isinstance(node, ast.BinOp | ast.AugAssign) for node in nodes) or any(
        name not in MOVES for name in calls
    )


def _is_few(iterated: ast.expr) -> bool:
    """Whether it is a few things: those that the source lists, those of a dictionary, or a small number of turns."""
    match iterated:
        case ast.List() | ast.Tuple() | ast.Set() | ast.Dict() | ast.Constant(value=str()):
            return True
        case ast.Call(func=ast.Attribute(attr="items" | "keys" | "values")):
            return True
        case ast.Call(
            func=ast.Name(id="range"), args=[ast.Constant(value=int(end))] | [_, ast.Constant(value=int(end))]
        ):
            return end < _FEW
        case ast.Call() if last_name(iterated) in WRAPS:
            return any(_is_few(each) for each in iterated.args)
        case _:
            return False


def _is_of_model(iterated: ast.expr) -> bool:
    """Whether it is the parts of a model."""
    return any(_OF_THE_MODEL.fullmatch(word_of(node)) for node in nodes_of(iterated))


def word_of(node: ast.AST) -> str:
    """The word of a name, of an attribute, or of a key such as `group["params"]`; empty: it is none of them."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            return name
        case _:
            return ""


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Names that an import of the file gives, and what they are names of."""
    names: dict[str, str] = {}
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            names.update({each.asname or each.name.partition(".")[0]: each.name for each in node.names})
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.update({each.asname or each.name: f"{node.module}.{each.name}" for each in node.names})
    return names


def method_name(call: ast.Call) -> str:
    """The name of the method that is called; empty: it is none."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def owner_of(call: ast.Call) -> str:
    """What has the method that is called, `self.h` of `self.h.add_(x)`; empty: it is more than names, or no method."""
    return dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def last_name(call: ast.Call) -> str:
    """The name of what is called, without that of its object or module; empty: it has none."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return method_name(call)
