"""Finds weights that a parametrization of torch's computes anew in every turn of a loop over time.

That is told where `torch.nn.utils.parametrize.cached()` around the loop gives the same: of an orthogonal matrix, and of
a weight norm. A spectral norm goes on with its iteration each time, and one of the program's own may draw numbers. By
the words of the source all turns must use the same modules, and go through them with gradients.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Final

from gpulaunch.profiler.samplers.function_bodies import lines_without_gradients
from gpulaunch.profiler.samplers.loop_turns import Loop
from gpulaunch.profiler.samplers.loops import MOVES, WRAPS, is_batch, last_name, lines_of
from gpulaunch.profiler.samplers.recomputed import CHECKPOINT
from gpulaunch.profiler.samplers.sampled_calls import MODULE, Call, lines_of_program
from gpulaunch.profiler.samplers.syntax import names_in, nodes_of, root_of, words_in
from gpulaunch.profiler.samplers.tensor_functions import COMPUTE, SHAPES, VIEWS
from gpulaunch.profiler.stack import Frame

_PARAMETRIZE: Final = "/torch/nn/utils/parametrize.py"
_STAYS: Final = frozenset({"_Orthogonal.forward", "_WeightNorm.forward"})
"""Parametrizations that give the same for the same, and keep nothing."""
_CACHED: Final = "get_cached_parametrization"
"""What computes weights once, within `torch.nn.utils.parametrize.cached()`."""
_OTHER_WEIGHTS: Final = frozenset({"functional_call", "grad", "checkpoint"})
"""Words of a loop that may give a module other weights in each turn, or run it again later."""
_OF_TENSORS: Final = COMPUTE | VIEWS | SHAPES | MOVES | {"select", "narrow", "range", "int", "float"}
"""Functions and methods that are no modules."""


def lines_using_parametrized(frames: Sequence[Frame]) -> list[Call]:
    """Return the lines of the program in a model that use weights which a parametrization is computing, the outermost
    first; empty: none is, or the line is in no model.

    Args:
        frames: the deepest first.
    """
    used = max((depth for depth, frame in enumerate(frames) if frame.file.endswith(_PARAMETRIZE)), default=-1)
    computed = frames[: used + 1]
    if not any(frame.name in _STAYS for frame in computed) or any(frame.name.endswith(_CACHED) for frame in computed):
        return []
    if any(frame.file.endswith(CHECKPOINT) for frame in frames):
        return []  # it runs in backward again, where nothing is cached
    model = max((depth for depth, frame in enumerate(frames) if frame.file.endswith(MODULE)), default=0)
    return lines_of_program(frames[used:model])


def loops_with_the_same_modules(tree: ast.Module, makes_steps: Callable[[Loop], bool]) -> set[int]:
    """Return the lines of the bodies of loops over many elements that use the same modules, if any, in every turn: none
    is called, or looked up, by what the loop goes through or sets.

    Args:
        tree: of a file.
        makes_steps: whether a loop makes training steps: then the weights change.
    """
    without_gradients = lines_without_gradients(tree)
    found: set[int] = set()
    for loop in nodes_of(tree):
        if not isinstance(loop, ast.For) or makes_steps(loop) or not without_gradients.isdisjoint(lines_of(loop)):
            continue
        if is_batch(loop.iter) and _is_of_data(loop.iter) and _has_the_same_modules(loop):
            found.update(line for each in _in_every_turn(loop.body, names_in(loop.target)) for line in lines_of(each))
    return found


def _in_every_turn(body: Sequence[ast.stmt], targets: Set[str]) -> Iterator[ast.stmt]:
    """The statements of a loop's body without those that only run for some of what it goes through."""
    for statement in body:
        if not isinstance(statement, ast.If | ast.Match):
            yield statement
        elif isinstance(statement, ast.If) and targets.isdisjoint(names_in(statement.test)):
            yield from _in_every_turn(statement.body, targets)


def _is_of_data(iterated: ast.expr) -> bool:
    """Whether a loop goes through numbers, or through what no attribute of the model holds."""
    if isinstance(iterated, ast.Call) and last_name(iterated) in {"range", *WRAPS}:
        return last_name(iterated) == "range" or all(map(_is_of_data, iterated.args))
    return "self" not in names_in(iterated)


def _has_the_same_modules(loop: ast.For) -> bool:
    body = [node for statement in loop.body for node in nodes_of(statement)]
    targets = names_in(loop.target)
    changing = targets | {node.id for node in body if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return _OTHER_WEIGHTS.isdisjoint(word for statement in loop.body for word in words_in(statement)) and not any(
        _takes_module(node, changing, _numbers_of(loop)) for node in body
    )


def _numbers_of(loop: ast.For) -> set[str]:
    """The names of a loop's target that count its turns."""
    match loop.target, loop.iter:
        case ast.Name(id=name), ast.Call(func=ast.Name(id="range")):
            return {name}
        case ast.Tuple(elts=[ast.Name(id=name), *_]), ast.Call(func=ast.Name(id="enumerate")):
            return {name}
        case _:
            return set()


def _takes_module(node: ast.AST, changing: Set[str], numbers: Set[str]) -> bool:
    """Whether a module may be one of those names, or be found by one: `layer(x)`, `stage.conv(x)`, `self.layers[i]`,
    `layers[i](x)`, `getattr(self, name)(x)`, `self.flow(i, x)`."""
    match node:
        case ast.Subscript(value=whole, slice=index) if changing & names_in(index):
            return root_of(whole) == "self"
        case ast.Call(func=ast.Name(id=name)) if name in changing:
            return True
        case ast.Call(func=ast.Subscript() | ast.Call() as function) if changing & names_in(function):
            return True
        case ast.Call(func=ast.Attribute(value=whole, attr=method)) if changing & names_in(whole):
            return method not in _OF_TENSORS
        case ast.Call(args=given, keywords=named) if not _is_of_torch(node):
            values = [*given, *(each.value for each in named)]
            return any(isinstance(each, ast.Name) and each.id in numbers for each in values)
        case _:
            return False


def _is_of_torch(call: ast.Call) -> bool:
    """Whether it is a function of torch's, or one of Python's, or a method of tensors."""
    return root_of(call.func, views=False) in {"torch", "F", "math"} or last_name(call) in _OF_TENSORS
