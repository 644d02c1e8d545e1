"""Finds in the source of a program an optimizer of its own that does what torch's AdamW does, tensor by tensor.

A dozen operations on each tensor read and write all of its elements each time; `torch.optim.AdamW(..., fused=True)`
goes through them once. Told is only Adam itself: a variant that does more with a gradient, such as its norm or its
sign, calls other functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from gpulaunch.profiler.samplers.function_bodies import optimizers_in
from gpulaunch.profiler.samplers.loops import last_name, lines_of, method_name, owner_of, word_of
from gpulaunch.profiler.samplers.syntax import assigned_in, dotted, nodes_of

_OF_ADAM: Final = frozenset(
    {
        *("mul_", "add", "add_", "addcmul_", "addcdiv_", "lerp_", "sqrt", "zeros_like", "zeros", "tensor", "item"),
        *("len", "get", "RuntimeError", "ValueError", "closure", "enable_grad", "no_grad", "setdefault"),
    }
)
"""Functions and methods that Adam needs."""


def lines_of_adam(tree: ast.Module) -> dict[int, int]:
    """Return the lines of the loops over the parameters in such optimizers, and the first line of each.

    Args:
        tree: of a file.
    """
    found: dict[int, int] = {}
    for each in optimizers_in(tree):
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
    nodes, loops = nodes_of(step), list(_loops_over_parameters(step))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    if len(loops) != 1 or any(last_name(call) not in _OF_ADAM for call in calls):
        return False
    if not all(_is_of_a_number(node) for node in nodes if isinstance(node, ast.Compare | ast.AugAssign)):
        return False
    parameter = ast.unparse(loops[0].target)
    squares = [call for call in calls if method_name(call) == "addcmul_"]
    updates = [call for call in calls if _is_update(call, parameter)]
    if len(squares) != 1 or len(updates) != 1:
        return False
    match squares[0], updates[0]:
        case (
            ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Attribute(value=ast.Name(id=second), attr="mul_"))),
                args=[a, b],
            ),
            ast.Call(func=ast.Attribute(attr="addcdiv_"), args=[ast.Name(id=first), _]),
        ):
            averages = [call for call in calls if _averages(call, first, step, parameter)]
            roots = [call for call in calls if method_name(call) == "sqrt" and owner_of(call) == second]
            is_corrected = any(isinstance(node, ast.Pow) for node in nodes)  # `1 - beta ** step`
            of_gradient = _is_gradient(a, step, parameter) and _is_gradient(b, step, parameter)
            return of_gradient and len(averages) == len(roots) == 1 and is_corrected
        case _:
            return False


def _averages(call: ast.Call, name: str, step: ast.FunctionDef, parameter: str) -> bool:
    """`exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)`, `exp_avg.lerp_(grad, 1 - beta1)`"""
    match call:
        case (
            ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr="mul_")), attr="add_"),
                args=[given],
            )
            | ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr="lerp_"), args=[given, _])
        ):
            return of == name and _is_gradient(given, step, parameter)
        case _:
            return False


def _is_of_a_number(node: ast.AST) -> bool:
    """`decay > 0`, `state["step"] += 1`"""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Compare) and any(
        isinstance(each, ast.Constant) for each in (node.left, *node.comparators)
    )


def _is_update(call: ast.Call, parameter: str) -> bool:
    """Whether a call changes the parameter by anything but itself, and numbers: not `p.add_(p, alpha=-decay)`."""
    name = method_name(call)
    if not name.endswith("_") or not _is_parameter(call.func, parameter, name):
        return False
    return name != "mul_" and not (name == "add_" and any(_is_parameter(each, parameter) for each in call.args[:1]))


def _is_parameter(node: ast.expr, parameter: str, method: str = "") -> bool:
    """Whether it is the parameter, or its `data`, or a method of that."""
    return ast.unparse(node).removesuffix(f".{method}" if method else "").removesuffix(".data") == parameter


def _is_gradient(node: ast.expr, step: ast.FunctionDef, parameter: str) -> bool:
    """Whether it is the gradient of the parameter, maybe with weight decay: `grad = grad.add(p, alpha=decay)`."""
    while isinstance(node, ast.Attribute) and node.attr == "data":
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr == "grad" and _is_parameter(node.value, parameter)
    values = [value for to, value in assigned_in(nodes_of(step)) if word_of(to) == dotted(node) != ""]
    return bool(values) and all(
        _is_decayed(each, node, parameter) or (not isinstance(each, ast.Name) and _is_gradient(each, step, parameter))
        for each in values
    )


def _is_decayed(value: ast.expr, gradient: ast.expr, parameter: str) -> bool:
    match value:
        case ast.Call(func=ast.Attribute(value=of, attr="add"), args=[added]):
            return dotted(of) == dotted(gradient) and _is_parameter(added, parameter)
        case _:
            return False
