"""Finds in the source of a program the loops that one operation on a whole batch could replace.

Not those that make steps, that only move or collect tensors, that go through the parts of a model, or whose turns need
each other. The words of the source decide; what they mean is not known.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Final

Loop = ast.For | ast.While | ast.AsyncFor | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_SUMS: Final = (ast.Add, ast.Sub, ast.Mult)
"""What may be done with all at once, in any order."""
_OF_THE_MODEL: Final = re.compile(
    r"(?:\w+_)?(?:parameters|params|buffers|weights|grads|gradients|modules|children|layers|blocks)|param_groups"
    r"|state_dict"
)
"""Names of the parts of a model, which differ in shape or need each other."""
_MOVES: Final = frozenset(
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
    todo: list[tuple[ast.AST, tuple[range, ...]]] = [(tree, ())]
    while todo:
        node, around = todo.pop()
        if isinstance(node, _Scope | Loop):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if not isinstance(node, Loop):
                around = ()
            elif _computes(node) and not makes_steps(node) and not _is_of_model(node) and not _carries(node):
                around = (*around, lines)
            found.update(dict.fromkeys(lines, around))
        todo += ((child, around) for child in ast.iter_child_nodes(node))
    return {line: loops for line, loops in found.items() if loops}


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """All calls in a part of a tree."""
    return (each for each in ast.walk(node) if isinstance(each, ast.Call))


def _computes(loop: Loop) -> bool:
    """Whether anything in it may be an operation with tensors."""
    if isinstance(loop, ast.For | ast.While | ast.AsyncFor):
        parts: list[ast.AST] = list(loop.body)
    elif isinstance(loop, ast.DictComp):
        parts = [loop.key, loop.value]
    else:
        parts = [loop.elt]
    nodes = [node for part in parts for node in ast.walk(part)]
    calls = (_last_name(node) for node in nodes if isinstance(node, ast.Call))
    return any(isinstance(node, ast.BinOp | ast.AugAssign) for node in nodes) or any(
        name not in _MOVES for name in calls
    )


def _is_of_model(loop: Loop) -> bool:
    """Whether it goes through the parts of a model."""
    if isinstance(loop, ast.While):
        return False
    iterated = [loop.iter] if isinstance(loop, ast.For | ast.AsyncFor) else [each.iter for each in loop.generators]
    nodes = (node for each in iterated for node in ast.walk(each))
    return any(_OF_THE_MODEL.fullmatch(_name(node)) for node in nodes)


def _carries(loop: Loop) -> bool:
    """Whether a turn needs what the one before has computed, such as the state of a recurrent network: it reads a
    variable and sets it later. A sum (`total = total + loss`) that nothing else reads can be taken of all at once."""
    if not isinstance(loop, ast.For | ast.While | ast.AsyncFor):
        return False
    uses = sorted(
        use for part in loop.body for each in ast.walk(part) if isinstance(each, ast.stmt) for use in _uses(each)
    )
    reads = {name for _, use, name in uses if use == _READ}
    is_set = {name.id for name in _names(loop.target)} if isinstance(loop, ast.For | ast.AsyncFor) else set[str]()
    before: set[str] = set()
    for _, use, name in uses:
        if use == _SET:
            if name in before:
                return True
            is_set.add(name)
        elif name not in is_set:
            if use == _CARRIED or (use == _SUMMED and name in reads):
                return True
            before.add(name)
    return False


_READ, _SUMMED, _CARRIED, _SET = range(4)
_Use = tuple[tuple[int, int], int, str]
"""Where a name is used, and how."""


def _uses(statement: ast.stmt) -> Iterator[_Use]:
    """How a statement uses names, without the statements in it: those that it sets are set where it ends."""
    nodes = list(_own(statement))
    local = {name.id for node in nodes if isinstance(node, ast.comprehension) for name in _names(node.target)}
    header = isinstance(statement, ast.For | ast.AsyncFor | ast.With | ast.AsyncWith)
    end = statement.end_lineno or 0, statement.end_col_offset or 0
    summed, counts = _summed(statement)
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            whole = ast.unparse(node.func.value)
            if any(ast.unparse(each) == whole for argument in node.args for each in ast.walk(argument)):
                yield (node.lineno, node.col_offset), _CARRIED, whole
        if not isinstance(node, ast.Name | ast.Attribute) or isinstance(node.ctx, ast.Del):
            continue
        name, at = ast.unparse(node), (node.lineno, node.col_offset)
        if name in local:
            continue
        if name == summed:
            if not counts:
                yield at, _SUMMED, name
        elif isinstance(node.ctx, ast.Store):
            yield at if header else end, _SET, name
        else:
            yield at, _READ, name
    if isinstance(statement, ast.Assign) and (name := _set_in_part(statement)):
        yield end, _CARRIED, name
    if isinstance(statement, ast.AugAssign) and not isinstance(statement.op, _SUMS):
        yield end, _CARRIED, ast.unparse(statement.target)


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        yield node
        todo += (each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.stmt))


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Name))


def _summed(statement: ast.stmt) -> tuple[str, bool]:
    """The name of the total in `total += loss` and `total = total + loss`, and whether it only counts; empty: none."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, _SUMS):
        name, terms = ast.unparse(statement.target), [statement.value]
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        name = ast.unparse(statement.targets[0])
        terms = _terms(statement.value)
        others = [each for each in terms if ast.unparse(each) != name]
        if len(others) == len(terms):
            return "", False
        terms = others
    else:
        return "", False
    if any(ast.unparse(node) == name for term in terms for node in ast.walk(term)):
        return "", False  # `x = x + f(x)`
    return name, all(isinstance(term, ast.Constant) for term in terms)


def _terms(value: ast.expr) -> list[ast.expr]:
    terms: list[ast.expr] = []
    while isinstance(value, ast.BinOp) and isinstance(value.op, _SUMS):
        terms.append(value.right)
        value = value.left
    return [*terms, value]


def _set_in_part(statement: ast.Assign) -> str:
    """The name of what is set in part and read in another: `table[i] = f(table[i - 1])`; empty: none."""
    target = statement.targets[0]
    if not isinstance(target, ast.Subscript):
        return ""
    whole = target.value
    while isinstance(whole, ast.Subscript):
        whole = whole.value
    same = {
        id(inner)
        for each in ast.walk(statement.value)
        if ast.unparse(each) == ast.unparse(target)
        for inner in ast.walk(each)
    }
    name = ast.unparse(whole)
    others = (
        each
        for each in ast.walk(statement.value)
        if id(each) not in same and isinstance(each, ast.Name | ast.Attribute)
    )
    return name if any(ast.unparse(each) == name for each in others) else ""


def _name(node: ast.AST) -> str:
    """The word of a name, of an attribute, or of a key such as `group["params"]`; empty: it is none of them."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            return name
        case _:
            return ""


def _last_name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""
