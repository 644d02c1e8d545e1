"""What a function computes anew in every call, although it is always the same: found in the source alone."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.samplers.constants import ALL, constants_of

MODULE = """
import math
import random
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

SIZES = [2, 4]
WINDOW = torch.hann_window(256)
WEIGHTS = nn.Parameter(torch.ones(3))
CENTRES = torch.zeros(3)
CENTRES[0] = 1

def relative(length):
    position = torch.arange(length)
    return (position[None] - position[:, None]).abs()

def table(length, width):
    rows = torch.zeros(length, width)
    for i in range(width):
        rows[:, i] = torch.arange(length) / (i + 1)
    with torch.no_grad():
        rows.clamp_(max=9)
    return rows

def noisy(length):
    return torch.ones(length) * torch.rand(length)

def remembered(length):
    CENTRES[1] = length
    return torch.ones(length).cumsum(0)

class Block(nn.Module):
    def __init__(self, width, depth: int, graph, heads=4):
        super().__init__()
        self.width = width
        self.depth = depth
        self.graph = graph
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.leaf = torch.ones(3, requires_grad=True)
        self.register_buffer("near", torch.rand(9, 9))
        self.register_buffer("mean", torch.zeros(width))
        self.rate = torch.tensor([1.0, 0.1])

    def mask(self, length, device):
        return torch.ones(length, length, device=device).tril()

    def forward(self, x, mask=None):
        b, t, c = x.shape
        {}
        self.mean.lerp_(x.mean(0), 0.1)
        return x
"""
LINE = MODULE[: MODULE.index("{}")].count("\n") + 1


def names_on(line: str) -> set[str]:
    return constants_of(ast.parse(MODULE.replace("{}", line))).get(LINE, set())


@pytest.mark.parametrize(
    "line",
    [
        "causal = torch.ones(t, t).tril()",
        "causal = torch.ones(x.size(1), len(x), device=x.device).tril()",
        "decay = torch.exp(-self.near.square())",
        "near = self.near @ self.near.T",
        "rates = self.rate.repeat(10) / math.sqrt(self.depth)",
        "at = torch.arange(self.width).square()",
        "band = F.normalize(WINDOW.float(), dim=0)",
        "grid = np.indices((96, 96)).sum(0)",
        "both = torch.eye(3) if x.sum() > 0 else torch.eye(4)",
        "return x, 0; y = torch.eye(3) + 1",
        "from torch import eye; y = torch.linspace(0, 1, t)",
    ],
)
def test_what_stays(line: str) -> None:
    assert names_on(line) == {ALL}


@pytest.mark.parametrize(
    ("line", "functions"),
    [
        ("y = relative(t)", {ALL, "relative"}),
        ("y = table(t, 8)", {ALL, "table"}),
        ("y = self.mask(t, x.device)", {ALL, "mask"}),
        ("x = x + relative(t)", {"relative"}),
        ("return self.linear(x) * self.mask(t, x.device)", {"mask"}),
        ("x = x + noisy(t)", set()),
        ("y = remembered(t)", set()),
        ("x = x + table(t, c) @ relative(x)", {"table"}),
    ],
)
def test_a_call_that_gives_the_same_within_what_varies(line: str, functions: set[str]) -> None:
    assert names_on(line) == functions


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("y = x.softmax(-1)", id="of an argument"),
        pytest.param("y = mask.tril()", id="of an optional argument"),
        pytest.param("y = torch.softmax(self.scale, 0)", id="of a parameter"),
        pytest.param("y = torch.softmax(self.leaf, 0)", id="of what needs a gradient"),
        pytest.param("y = torch.softmax(WEIGHTS, 0)", id="of a parameter of the module"),
        pytest.param("y = self.mean * torch.exp(self.mean)", id="of a buffer that is updated"),
        pytest.param("y = CENTRES.exp()", id="of what the module changes"),
        pytest.param("y = self.graph.exp()", id="of what may be a parameter"),
        pytest.param("y = self.linear(torch.eye(c))", id="a module"),
        pytest.param("y = self.weight.norm()", id="not set here"),
        pytest.param("y = torch.randn(t, t).tril()", id="random"),
        pytest.param("y = np.random.default_rng(0)", id="a generator"),
        pytest.param("y = torch.ones(3).normal_()", id="filled at random"),
        pytest.param("y = random.random() * torch.ones(t)", id="of another package"),
        pytest.param("y = torch.zeros(b, t)", id="room"),
        pytest.param("y = b * t // 2", id="numbers"),
        pytest.param("x /= math.sqrt(self.depth)", id="by which something changes"),
        pytest.param("x[0] = torch.eye(3).exp()", id="put into what varies"),
        pytest.param("y = max(SIZES)", id="a builtin function"),
        pytest.param("y = [each.exp() for each in x]", id="a comprehension"),
        pytest.param("y = torch.zeros(t); y[0] = x[0, 0, 0]; z = y.exp()", id="filled with what varies"),
        pytest.param("y = torch.zeros(3); y.uniform_(); z = y.exp()", id="filled with random numbers"),
        pytest.param("y = torch.zeros(3); y.requires_grad_(); z = y.exp()", id="made a parameter"),
        pytest.param("y = torch.zeros(3); y = x; z = y.exp()", id="set twice"),
    ],
)
def test_what_may_vary(line: str) -> None:
    assert names_on(line) == set()


def test_what_varies_by_a_loop_is_carried_on() -> None:
    source = """
import torch
def forward(x):
    h = torch.zeros(3)
    for i in range(9):
        g = torch.tanh(h)
        w = torch.full((3,), i).exp()
        h = h + x[i]
    return h
"""
    assert constants_of(ast.parse(source)) == {7: {ALL}}


@pytest.mark.parametrize(
    "function",
    [
        pytest.param("def main():\n    y = torch.eye(3).exp()\n", id="no arguments"),
        pytest.param(
            "def main(args):\n    for x in args:\n        y = torch.eye(3).exp()\n        x.backward()\n",
            id="it trains",
        ),
        pytest.param("def batches(n):\n    yield 0\n    y = torch.eye(3).exp()\n", id="a generator"),
        pytest.param("class A:\n    def __init__(self, n):\n        y = torch.eye(3).exp()\n", id="made once"),
        pytest.param("def f(n):\n    def g(m):\n        y = torch.eye(3).exp()\n", id="a function in another"),
    ],
)
def test_functions_that_may_run_once_are_left_out(function: str) -> None:
    assert not constants_of(ast.parse(f"import torch\n{function}"))


def test_functions_that_call_each_other_end() -> None:
    source = (
        "import torch\ndef f(n):\n    return g(3)\ndef g(n):\n    return f(n)\nclass A(A):\n    def f(self, n): pass"
    )
    assert constants_of(ast.parse(source)) == {}


WORDS = st.sampled_from(["x", "self.near", "torch.eye(3)", "t", "WINDOW", "relative(2)", "[1]", "self", "(lambda: x)"])


@given(st.recursive(WORDS, lambda inner: st.builds("({} @ {})".format, inner, inner), max_leaves=12))
def test_an_expression_stays_only_if_no_part_of_it_varies(expression: str) -> None:
    """Costs 0.5 s."""
    found = names_on(f"y = {expression}")
    varies = any(word in expression for word in ("x", "lambda")) or "self" in expression.replace("self.near", "")
    assert (ALL in found) == (not varies and ("@" in expression or "(" in expression))
