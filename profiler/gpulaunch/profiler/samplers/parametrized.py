"""Finds weights that a parametrization (`orthogonal`, `spectral_norm`) computes anew in every turn of a loop."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Final

from gpulaunch.profiler.samplers.loop_turns import Loop
from gpulaunch.profiler.samplers.loops import WRAPS, is_batch, last_name, lines_of
from gpulaunch.profiler.samplers.sampled_calls import Call, lines_of_program
from gpulaunch.profiler.samplers.syntax import assigned_in, names_in, nodes_of, root_of
from gpulaunch.profiler.stack import Frame

_PARAMETRIZE: Final = "/torch/nn/utils/parametrize.py"
_CACHED: Final = "get_cached_parametrization"
"""What computes weights once, within `torch.nn.utils.parametrize.cached()`."""
_MODULE: Final = "/torch/nn/modules/module.py"


def lines_using_parametrized(frames: Sequence[Frame]) -> list[Call]:
    """Return the lines of the program in a model that use weights which a parametrization is computing, the outermost
    first; empty: none is, or the line is in no model.

    Args:
        frames: the deepest first.
    """
    if any(frame.name.endswith(_CACHED) for frame in frames):
        return []
    used = max((depth for depth, frame in enumerate(frames) if frame.file.endswith(_PARAMETRIZE)), default=len(frames))
    model = max((depth for depth, frame in enumerate(frames) if frame.file.endswith(_MODULE)), default=0)
    return lines_of_program(frames[used:model])


def loops_with_the_same_modules(tree: ast.Module, makes_steps: Callable[[Loop], bool]) -> set[int]:
    """Return the lines of loops over many elements that use the same modules, if any, in every turn: none is called, or
    looked up, by what the loop goes through.

    Args:
        tree: of a file.
        makes_steps: whether a loop makes training steps: then the weights change.
    """
    loops = [node for node in nodes_of(tree) if isinstance(node, Loop)]
    return {line for loop in loops if _has_the_same_modules(loop) and not makes_steps(loop) for line in lines_of(loop)}


def _has_the_same_modules(loop: Loop) -> bool:
    parts = [loop] if isinstance(loop, ast.For) else loop.generators
    if not all(is_batch(each.iter) and _is_of_data(each.iter) for each in parts):
        return False
    nodes = nodes_of(loop)
    taken = {name for each in parts for name in names_in(each.target)}
    taken |= {name for target, value in assigned_in(nodes) if taken & names_in(value) for name in names_in(target)}
    return not any(_takes_module(node, taken) for node in nodes)


def _is_of_data(iterated: ast.expr) -> bool:
    """Whether a loop goes through numbers, or through what no attribute of the model holds."""
    if isinstance(iterated, ast.Call) and last_name(iterated) in {"range", *WRAPS}:
        return last_name(iterated) == "range" or all(map(_is_of_data, iterated.args))
    return "self" not in names_in(iterated)


def _takes_module(node: ast.AST, taken: set[str]) -> bool:
    """Whether a module may be one of those names, or be found by one: `layer(x)`, `self.layers[i]`, `layers[i](x)`."""
    match node:
        case ast.Subscript(value=whole, slice=index) if taken & names_in(index):
            return root_of(whole) == "self"
        case ast.Call(func=ast.Name(id=name)) if name in taken:
            return True
        case ast.Call(func=ast.Subscript(slice=index)):
            return bool(taken & names_in(index))
        case ast.Call() if last_name(node) == "getattr":
            return any(taken & names_in(each) for each in node.args)
        case _:
            return False
