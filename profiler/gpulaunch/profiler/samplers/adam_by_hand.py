"""Finds in the source of a program an optimizer of its own that does what torch's AdamW does, tensor by tensor.

A dozen operations on each tensor read and write all of its elements each time; `torch.optim.AdamW(..., fused=True)`
goes through them once. Told is only Adam itself: a variant that does more with a gradient, such as its norm or its
sign, calls other functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from gpulaunch.profiler.samplers.loops import calls_in, last_name, lines_of, method_name, word_of
from gpulaunch.profiler.samplers.syntax import nodes_of

_OF_ADAM: Final = frozenset(
    {
        *("mul", "mul_", "add", "add_", "sub_", "div", "div_", "addcmul_", "addcdiv_", "lerp_", "sqrt", "sqrt_", "pow"),
        *("zeros_like", "maximum", "max", "copy_", "tensor", "item", "clone", "detach", "to", "float", "len", "get"),
        *("RuntimeError", "ValueError", "closure", "enable_grad", "no_grad", "setdefault", "append", "zeros"),
    }
)
"""Functions and methods that Adam needs."""


def lines_of_adam(tree: ast.Module) -> dict[int, int]:
    """Return the lines of the loops over the parameters in such optimizers, and the first line of each.

    Args:
        tree: of a file.
    """
    found: dict[int, int] = {}
    for each in nodes_of(tree):
        if isinstance(each, ast.ClassDef) and any(word_of(base) == "Optimizer" for base in each.bases):
            for step in each.body:
                if isinstance(step, ast.FunctionDef) and step.name == "step" and _is_adam(step):
                    for loop in _loops_over_parameters(step):
                        found.update(dict.fromkeys(lines_of(loop), loop.lineno))
    return found


def _loops_over_parameters(step: ast.FunctionDef) -> Iterator[ast.For]:
    """`for p in group["params"]:`"""
    for node in nodes_of(step):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Subscript) and word_of(node.iter.slice) == "params":
            yield node


def _is_adam(step: ast.FunctionDef) -> bool:
    calls = list(calls_in(step))
    loops = list(_loops_over_parameters(step))
    if len(loops) != 1 or any(last_name(call) not in _OF_ADAM for call in calls):
        return False
    if not all(_is_of_a_number(node) for node in nodes_of(step) if isinstance(node, ast.Compare)):
        return False
    parameter = ast.unparse(loops[0].target)
    squares = [call for call in calls if method_name(call) == "addcmul_"]
    updates = [call for call in calls if _is_update(call, parameter)]
    return (
        len(squares) == len(updates) == 1
        and method_name(updates[0]) == "addcdiv_"
        and all(_is_gradient(each, step, parameter) for each in squares[0].args[:2])
        and not _is_gradient(updates[0].args[0], step, parameter)
    )


def _is_of_a_number(compared: ast.Compare) -> bool:
    return any(isinstance(each, ast.Constant) for each in (compared.left, *compared.comparators))


def _is_update(call: ast.Call, parameter: str) -> bool:
    """Whether a call changes the parameter by anything but itself, and numbers: not `p.add_(p, alpha=-decay)`."""
    if not isinstance(call.func, ast.Attribute) or ast.unparse(call.func.value) not in (parameter, f"{parameter}.data"):
        return False
    is_decay = call.func.attr == "mul_" or (call.func.attr == "add_" and _is_parameter(call.args[0], parameter))
    return call.func.attr.endswith("_") and not is_decay


def _is_parameter(node: ast.expr, parameter: str) -> bool:
    return ast.unparse(node) in (parameter, f"{parameter}.data")


def _is_gradient(node: ast.expr, step: ast.FunctionDef, parameter: str) -> bool:
    """Whether it is the gradient of the parameter, maybe with weight decay."""
    while isinstance(node, ast.Attribute) and node.attr == "data":
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr == "grad" and _is_parameter(node.value, parameter)
    if not isinstance(node, ast.Name):
        return False
    values = [
        each.value
        for each in nodes_of(step)
        if isinstance(each, ast.Assign) and any(word_of(target) == node.id for target in each.targets)
    ]
    return bool(values) and all(_is_gradient_or_decayed(each, node.id, step, parameter) for each in values)


def _is_gradient_or_decayed(value: ast.expr, name: str, step: ast.FunctionDef, parameter: str) -> bool:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr == "add" and not _is_parameter(value.args[0], parameter):
            return False
        value = value.func.value
    return word_of(value) == name or _is_gradient(value, step, parameter)
