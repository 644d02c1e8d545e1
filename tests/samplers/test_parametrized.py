"""Weights that a parametrization computes in every turn of a loop, by stacks as torch 2.13 has them."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from gpulaunch.profiler.daemon.stack_samples import StackSamples
from gpulaunch.profiler.record import RankPlace
from gpulaunch.profiler.record.line_calls import PARAMETRIZED
from gpulaunch.profiler.samplers.parametrized import lines_using_parametrized, loops_with_the_same_modules
from gpulaunch.profiler.stack import Frame

TORCH = "/opt/conda/lib/python3.12/site-packages/torch"
MODULE = Frame("Module._call_impl", f"{TORCH}/nn/modules/module.py", 1800)
WEIGHT = [
    Frame("_Orthogonal.forward", f"{TORCH}/nn/utils/parametrizations.py", 90),
    MODULE,
    Frame("ParametrizationList.forward", f"{TORCH}/nn/utils/parametrize.py", 290),
    MODULE,
    Frame("_inject_property.<locals>.get_parametrized", f"{TORCH}/nn/utils/parametrize.py", 400),
]
CACHED = Frame("_inject_property.<locals>.get_cached_parametrization", f"{TORCH}/nn/utils/parametrize.py", 390)
LINEAR = [Frame("Linear.forward", f"{TORCH}/nn/modules/linear.py", 130), MODULE]
PROGRAM = "/home/me/train.py"
CELL = Frame("Cell.forward", PROGRAM, 12)
NET = Frame("Net.forward", PROGRAM, 20)
MAIN = Frame("<module>", PROGRAM, 90)


@pytest.mark.parametrize(
    ("frames", "lines"),
    [
        ([*WEIGHT, *LINEAR, CELL, MODULE, NET, MODULE, MAIN], [20, 12]),
        ([*WEIGHT, *LINEAR, NET, MODULE, MAIN], [20]),
        ([*WEIGHT, NET, MODULE, MAIN], [20]),
        ([Frame("Symmetric.forward", PROGRAM, 5), *WEIGHT[1:], *LINEAR, NET, MODULE, MAIN], [20]),
        ([*WEIGHT[:-1], CACHED, WEIGHT[-1], *LINEAR, NET, MODULE, MAIN], []),
        ([*LINEAR, NET, MODULE, MAIN], []),
        ([*WEIGHT, *LINEAR, MAIN], []),
        ([], []),
    ],
    ids=[
        "in a cell",
        "in a model",
        "weight read",
        "by a program's own",
        "cached",
        "no parametrization",
        "no model",
        "no stack",
    ],
)
def test_the_lines_that_use_weights_are_those_of_the_model_around_the_parametrization(
    frames: list[Frame], lines: list[int]
) -> None:
    assert [each.line for each in lines_using_parametrized(frames)] == lines


SAME = [
    "for t in range(x.size(1)): h = self.cell(x[:, t], h)",
    "for now in x.unbind(1): h = self.cell(now, h)",
    "for t, now in enumerate(x.transpose(0, 1)): out[t] = h = self.cell(now.float(), h)",
    "out = [self.decode(z, t) for t in times]",
    "for a, b in zip(before, after): loss = loss + self.near(a, b)",
    "for t in range(self.length): h = self.cell(self.norm(x[:, t]), h)",
]
OTHERS = [
    "for layer in self.convolutions: x = layer(x)",
    "for layer in stack: x = layer(x)",
    "for i in range(depth): x = self.convolutions[i](x)",
    "for i in range(depth): x = stack[i](x)",
    "for i in range(depth): x = getattr(self, f'conv{i}')(x)",
    "for i in range(depth):\n    at = depth - i\n    x = self.convolutions[at](x)",
    "for dilation, layer in zip(dilations, self.convolutions): x = pad(x, dilation)",
    "for head in (self.first, self.second): x = self.mix(x)",
    "for _ in range(3): x = self.refine(x)",
    "for x in loader:\n    self.net(x).sum().backward()\n    optimizer.step()",
    "while t < length: h = self.cell(x[:, t], h)",
    "h = self.cell(x, h)",
]


def lines_of(text: str) -> set[int]:
    tree = ast.parse(text)
    return loops_with_the_same_modules(tree, lambda loop: "backward" in ast.unparse(loop))


@pytest.mark.parametrize("loop", SAME)
def test_a_loop_over_time_uses_the_same_modules(loop: str) -> None:
    assert lines_of(loop) == {1}


@pytest.mark.parametrize("loop", OTHERS)
def test_a_loop_over_modules_or_steps_does_not(loop: str) -> None:
    assert lines_of(loop) == set()


@pytest.mark.parametrize(("loop", "is_told"), [(SAME[0], True), (OTHERS[2], False)])
def test_what_is_computed_again_is_told_where_the_weights_are_used(tmp_path: Path, loop: str, *, is_told: bool) -> None:
    program = tmp_path / "train.py"
    program.write_text(f"def forward(self, x, h):\n    {loop}\n")
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    net = Frame("Net.forward", str(program), 2)
    samples.add(place, "forward", [*WEIGHT, *LINEAR, net, MODULE, Frame("main", str(program), 9)])
    samples.add(place, "forward", [*LINEAR, net, MODULE, Frame("main", str(program), 9)])

    assert samples.tally.calls == ({(0, f"{program}:2"): PARAMETRIZED} if is_told else {})
    assert samples.tally.calling == ({(0, f"{program}:2"): 1} if is_told else {})
