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
CHECKPOINT = Frame("checkpoint", f"{TORCH}/utils/checkpoint.py", 480)
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
        ([*WEIGHT, *LINEAR, NET, MODULE, CHECKPOINT, MAIN], []),
        ([Frame("Noisy.forward", PROGRAM, 5), *WEIGHT[1:], *LINEAR, NET, MODULE, MAIN], []),
        ([Frame("_SpectralNorm.forward", WEIGHT[0].file, 5), *WEIGHT[1:], *LINEAR, NET, MODULE, MAIN], []),
        ([*WEIGHT[:-1], CACHED, WEIGHT[-1], *LINEAR, NET, MODULE, MAIN], []),
        ([*LINEAR, NET, MODULE, MAIN], []),
        ([*WEIGHT, *LINEAR, MAIN], []),
        ([], []),
    ],
    ids=[
        *("in a cell", "in a model", "weight read", "checkpoint", "a program's own", "spectral norm", "cached"),
        *("no parametrization", "no model", "no stack"),
    ],
)
def test_the_lines_that_use_weights_are_those_of_the_model_around_the_parametrization(
    frames: list[Frame], lines: list[int]
) -> None:
    assert [each.line for each in lines_using_parametrized(frames)] == lines


SAME = [
    "h = self.cell(x[:, t], h)",
    "h = self.cell(self.norm(x[:, t].float()), h)",
    "h = torch.where(t < lengths, self.cell(x[:, t], h), h)",
    "out[t] = h = self.cell(x.select(1, t), h)",
]
OTHERS = [
    "x = self.convolutions[t](x)",
    "x = stack[t](x)",
    "x = stack[t].attention(x)",
    "x = getattr(self, f'conv{t}')(x)",
    "layer = getattr(self, f'conv{t}'); x = layer(x)",
    "at = depth - t; x = self.convolutions[at](x)",
    "name = f'conv{depth - t}'; x = getattr(self, name)(x)",
    "x = self.convolutions[at](x); at += 1",
    "x = self._flow(t, x)",
    "x = self._flow(x, turn=t)",
    "x = checkpoint(self.cell, x, h)",
    "w = torch.autograd.grad(functional_call(self.net, w, x), w)",
    "self.net(x[:, t]).sum().backward(); optimizer.step()",
]


def lines_of(text: str) -> set[int]:
    tree = ast.parse(text)
    return loops_with_the_same_modules(tree, lambda loop: "backward" in ast.unparse(loop))


@pytest.mark.parametrize("body", SAME)
@pytest.mark.parametrize("of", ["t in range(x.size(1))", "t in range(self.length)", "t, now in enumerate(x.unbind(1))"])
def test_a_loop_over_time_uses_the_same_modules(of: str, body: str) -> None:
    assert lines_of(f"for {of}:\n    {body}\nelse:\n    pass") == {2}


@pytest.mark.parametrize("body", OTHERS)
@pytest.mark.parametrize("of", ["t in range(depth)", "t, now in enumerate(x.unbind(1))"])
def test_a_loop_over_modules_or_steps_does_not(of: str, body: str) -> None:
    assert lines_of(f"for {of}:\n    {body}") == set()


@pytest.mark.parametrize(
    "text",
    [
        "for layer in self.convolutions: x = layer(x)",
        "for layer in stack: x = layer(x)",
        "for layer in stack: x = layer.attention(x)",
        "for dilation, layer in zip(dilations, self.convolutions): x = pad(x, dilation)",
        "for head in (self.first, self.second): x = self.mix(x)",
        "for _ in range(3): x = self.refine(x)",
        "with torch.no_grad():\n    for t in range(length): h = self.cell(x[:, t], h)",
        "for t in range(length):\n    with torch.no_grad(): h = self.target(x[:, t], h)",
        "while t < length: h = self.cell(x[:, t], h)",
        "y = self.proj(torch.stack([x[:, i] for i in order], 1))",
        "h = self.cell(x, h)",
    ],
)
def test_what_is_no_loop_over_time_or_has_no_gradients_does_not(text: str) -> None:
    assert lines_of(text) == set()


def test_what_runs_for_some_of_the_turns_is_left_out() -> None:
    text = (
        "for t in range(length):\n    if t == 0:\n        h = self.first(x)\n    if masked:\n        h = self.cell(h)"
    )
    assert lines_of(text) == {5}


@pytest.mark.parametrize(("loop", "is_told"), [(SAME[0], True), (OTHERS[0], False)])
def test_what_is_computed_again_is_told_where_the_weights_are_used(tmp_path: Path, loop: str, *, is_told: bool) -> None:
    program = tmp_path / "train.py"
    program.write_text(f"def forward(self, x, h):\n    for t in range(9): {loop}\n")
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    net = Frame("Net.forward", str(program), 2)
    samples.add(place, "forward", [*WEIGHT, *LINEAR, net, MODULE, Frame("main", str(program), 9)])
    samples.add(place, "forward", [*LINEAR, net, MODULE, Frame("main", str(program), 9)])

    assert samples.tally.calls == ({(0, f"{program}:2"): PARAMETRIZED} if is_told else {})
    assert samples.tally.calling == ({(0, f"{program}:2"): 1} if is_told else {})
