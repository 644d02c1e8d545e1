"""What a function computes anew in every call, although it is always the same: found in the source alone."""

from __future__ import annotations

import ast
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.samplers.constants import constants_of

ALL = ""
MODULE = """
import math
import random
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RATE, SEED = 16_000, 0

def relative(length):
    position = torch.arange(length)
    return (position[None] - position[:, None]).abs()

def normalised(graph):
    graph = graph + torch.eye(len(graph))
    root = torch.diag(graph.sum(1).pow(-0.5))
    return root @ graph @ root

def part(table):
    return table[0]

def noisy(length):
    return torch.ones(length) * torch.rand(length)

def remembered(length):
    CENTRES[1] = length
    return torch.ones(length).cumsum(0)

def bank(bands, bins, low=20.0):
    edges = torch.linspace(low, RATE / 2, bands + 1)
    found = torch.zeros(bins, bands)
    for band in range(bands):
        left, right = edges[band], edges[band + 1]
        found[:, band] = torch.clamp(right - left, min=0)
        found[:, band] *= 2 / (right - left)
    return found

def filled(table, bands):
    for band in range(bands):
        table[band] = 0
    return table.exp()

class Block(nn.Module):
    def __init__(self, width, depth: int, graph, learnable=False):
        super().__init__()
        self.width = width
        self.graph = graph
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("near", torch.rand(9, 9))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("queue", torch.zeros(width))
        self.register_buffer("sums", torch.zeros(width))
        self.register_buffer("tied", self.linear.weight.detach())
        if learnable:
            self.freqs = nn.Parameter(torch.ones(width))
        else:
            self.register_buffer("freqs", torch.ones(width))

    def mask(self, length, device):
        return torch.ones(length, length, device=device).tril()

    def forward(self, x, mask=None, labels=None):
        b, t, c = x.shape
        {}
        self.mean.lerp_(x.mean(0), 0.1)
        queue = self.queue
        queue[:b] = x[0]
        dist.all_reduce(self.sums)
        return x
"""
LINE = MODULE[: MODULE.index("{}")].count("\n") + 1


def names_on(line: str) -> set[str]:
    """The functions that compute the same on a line; `ALL` of a statement, too."""
    tree = ast.parse(MODULE.replace("{}", line.replace("\n", "\n        ")))
    names = {node.lineno: node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    last = LINE + line.count("\n")
    return {names[lines.start] if lines else ALL for lines in constants_of(tree).get(last, ())}


@pytest.mark.parametrize(
    "line",
    [
        "causal = torch.ones(t, t).tril()",
        "causal = torch.ones(x.size(1), len(x), device=x.device).tril()",
        "decay = torch.exp(-self.near.square())",
        "near = self.near @ self.near.T",
        "scaled = self.near[:3].exp() / math.sqrt(t)",
        "at = torch.arange(self.width).square()",
        "grid = np.indices((96, 96)).sum(0)",
        "at = torch.arange(9) / RATE",
        "half = t // 2\nat = torch.arange(half).cos()",
        "at = torch.arange(t, device=x.device)\nangles = torch.einsum('i,j->ij', at, self.near[0])",
        "if mask is None:\n    mask = torch.ones(t, t).tril()",
        "return x, torch.eye(3) + 1\ny = torch.eye(3) + 1",
    ],
)
def test_what_stays(line: str) -> None:
    assert names_on(line) == {ALL}


@pytest.mark.parametrize(
    ("line", "functions"),
    [
        ("y = relative(t)", {ALL, "relative"}),
        ("y = normalised(self.near)", {ALL, "normalised"}),
        ("y = self.mask(t, x.device)", {ALL, "mask"}),
        ("x = x + relative(t)", {"relative"}),
        ("return self.linear(x) * self.mask(t, x.device)", {"mask"}),
        ("y = bank(self.width, 9)", {ALL, "bank"}),
        ("y = bank(2 * self.width + 1, bins=SEED)", {ALL, "bank"}),
        ("y = bank(t, c).to(x)", {"bank"}),
        ("y = normalised(self.graph)", set()),
        ("y = filled(self.near, 3)", set()),
        ("y = self.near if mask is None else normalised(self.near)", set()),
        ("x = x + noisy(t)", set()),
        ("y = remembered(t)", set()),
        ("y = part(self.near)\ny[0] = 1\nz = self.near.exp()", set()),
    ],
)
def test_a_call_that_gives_the_same_within_what_varies(line: str, functions: set[str]) -> None:
    """In the last one, `y` is another name of the buffer."""
    assert names_on(line) == functions


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("y = x.softmax(-1)", id="of an argument"),
        pytest.param("y = mask.tril()", id="of an optional argument"),
        pytest.param("y = torch.softmax(self.scale, 0)", id="of a parameter"),
        pytest.param("y = torch.softmax(self.freqs, 0)", id="a parameter or a buffer"),
        pytest.param("y = self.tied.exp()", id="a buffer with the memory of a parameter"),
        pytest.param("y = torch.exp(self.mean)", id="a buffer that is updated"),
        pytest.param("y = torch.exp(self.queue)", id="a buffer that is updated by another name"),
        pytest.param("y = torch.exp(self.sums)", id="a buffer that is given to what may update it"),
        pytest.param("y = self.graph.exp()", id="what may be a parameter"),
        pytest.param("y = torch.eye(3) * self.width", id="what may be a parameter, as a number"),
        pytest.param("y = self.linear(torch.eye(c))", id="a module"),
        pytest.param("y = self.weight.norm()", id="not set here"),
        pytest.param("y = torch.randn(t, t).tril()", id="random"),
        pytest.param("y = np.random.beta(1.0, 1.0) * torch.eye(3).exp()", id="random by another name"),
        pytest.param("y = F.gumbel_softmax(torch.zeros(b, t))", id="random inside"),
        pytest.param("y = torch.ones(3).normal_()", id="filled at random"),
        pytest.param("y = random.random() * torch.ones(t)", id="of another package"),
        pytest.param("RATE = x.sum()\ny = torch.arange(9) / RATE", id="a number that is set again"),
        pytest.param("y = torch.zeros(b, t)", id="room"),
        pytest.param("y = b * t // 2", id="numbers"),
        pytest.param("y = max(b, t)", id="a builtin function"),
        pytest.param("y = [each.exp() for each in x]", id="a comprehension"),
        pytest.param("x /= math.sqrt(t)", id="by which something changes"),
        pytest.param("x[0] = torch.eye(3).exp()", id="put into what varies"),
        pytest.param("y = torch.zeros(t)\ny[0] = x[0, 0, 0]\nz = y.exp()", id="filled"),
        pytest.param("y = torch.zeros(t)\ny[0][:1] = x[0, 0, 0]\nz = y.exp()", id="filled in parts"),
        pytest.param("y = torch.zeros(3)\ny.uniform_()\nz = y.exp()", id="filled with random numbers"),
        pytest.param("y = torch.zeros(3)\nnn.init.normal_(y)\nz = y.exp()", id="filled by a function"),
        pytest.param("y = torch.zeros(3)\ndist.broadcast(y, 0)\nz = y.exp()", id="received"),
        pytest.param("y = torch.zeros(3)\nv = y.view(-1)\nv[x.argmax()] = 1\nz = y.exp()", id="filled by another name"),
        pytest.param("y = torch.zeros(3)\ntorch.exp(x, out=y)\nz = y.exp()", id="as out="),
        pytest.param("y = torch.zeros(3)\ny.requires_grad_()\nz = y.exp()", id="made a parameter"),
        pytest.param("y = []\ny.append(x)\nz = torch.stack(y)", id="a list that is filled"),
        pytest.param("y = torch.zeros(3)\ny = x\nz = y.exp()", id="set twice"),
        pytest.param("k = 1\nfor each in x:\n    k += 1\nz = torch.eye(k).exp()", id="counted in a loop"),
        pytest.param("k = 1\nif x.sum() > 0:\n    k = 2\nz = torch.eye(k).exp()", id="set by a condition"),
        pytest.param("kept = x[labels > 0]\nz = torch.eye(kept.shape[0]).exp()", id="of a length that varies"),
        pytest.param("x = x[labels > 0]\nz = torch.eye(x.shape[0]).exp()", id="of an argument's new length"),
        pytest.param("def f(n):\n    return torch.eye(3).exp()\nz = f(3)", id="a function in another"),
    ],
)
def test_what_may_vary(line: str) -> None:
    assert names_on(line) == set()


@pytest.mark.parametrize(
    "change",
    [
        'setattr(self, "near", 0)',
        "for each in self.buffers(): each.zero_()",
        'self._buffers["near"] = 0',
        "self.near = 0",
        "block.near.data = 0",
        "update(block.near)",
        'getattr(block, "near").add_(1)',
    ],
)
def test_a_buffer_that_anything_in_the_file_may_change_is_none(change: str) -> None:
    source = MODULE.replace("{}", "y = self.near.exp()")
    assert LINE in constants_of(ast.parse(source))
    assert LINE not in constants_of(ast.parse(f"{source}\ndef change(self, block):\n    {change}\n"))


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("self.width = width", "self.width = torch.tensor(1.0)"),
        ("self.width = width", "self.width = nn.Parameter(width)"),
        ("self.width = width", "pass\n    def hook(self):\n        self.width = 3"),
        ("return x\n", "self.width[0] += 1\n        return x\n"),
        ("return x\n", "self.width.fill_(2)\n        return x\n"),
        ("    def mask(", "    width = 5\n    def mask("),
    ],
    ids=["a tensor", "a parameter", "set by a hook", "a list that changes", "a tensor that changes", "a default"],
)
def test_a_number_of_a_module_is_one_that_only_init_sets(was: str, now: str) -> None:
    source = MODULE.replace("{}", "at = torch.arange(self.width).square()")
    assert any(each == [range(0)] for each in constants_of(ast.parse(source)).values())
    assert not constants_of(ast.parse(source.replace(was, now)))


def test_a_method_that_is_given_nothing_may_compute_the_same() -> None:
    source = MODULE.replace("{}", "pass") + "\n    def table(self):\n        return self.near.exp()\n"
    assert source.count("\n") in constants_of(ast.parse(source))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param("def main():\n    y = torch.eye(3).exp()\n", id="no arguments"),
        pytest.param(
            "def main(args):\n    for x in args:\n        y = torch.eye(3).exp()\n        x.backward()\n",
            id="it trains",
        ),
        pytest.param("def batches(n):\n    yield 0\n    y = torch.eye(3).exp()\n", id="a generator"),
        pytest.param("async def f(n):\n    y = torch.eye(3).exp()\n", id="a coroutine"),
        pytest.param("class A:\n    def __init__(self, n):\n        y = torch.eye(3).exp()\n", id="made once"),
        pytest.param("def f(n):\n    def g(m):\n        y = torch.eye(3).exp()\n", id="a function in another"),
        pytest.param("def f(n, torch):\n    y = torch.eye(3).exp()\n", id="another torch"),
    ],
)
def test_functions_that_may_run_once_are_left_out(function: str) -> None:
    assert not constants_of(ast.parse(f"import torch\n{function}"))


def test_a_method_that_another_class_has_too_may_be_another() -> None:
    source = MODULE.replace("{}", "x = x + self.mask(t, x.device)")
    other = "\nclass Learned(Block):\n    def mask(self, length, device):\n        return self.scale\n"
    assert LINE in constants_of(ast.parse(source))
    assert LINE not in constants_of(ast.parse(source + other))


POLYNOMIALS = """
import torch
from torch import nn

class Roads(nn.Module):
    def __init__(self, near, order):
        super().__init__()
        self.order = order
        self.register_buffer("near", near)

    def polynomials(self):
        near = self.near / self.near.sum()
        terms = [torch.eye(near.size(0)), near]
        for _ in range(2, self.order):
            terms.append(2.0 * near @ terms[-1] - terms[-2])
        return torch.stack(terms)

    def forward(self, x):
        return torch.einsum("kmn,bnc->bkmc", self.polynomials(), x)
"""


def test_a_list_of_what_stays_is_the_same_as_all_of_it() -> None:
    lines = POLYNOMIALS.splitlines()
    told = {lines[line - 1].strip() for line in constants_of(ast.parse(POLYNOMIALS))}
    assert told == {"near = self.near / self.near.sum()", lines[-1].strip()}


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("terms.append(2.0", "terms[-1] += 1\n            terms.append(2.0"),
        ("terms.append(2.0", "terms[-1].mul_(2)\n            terms.append(2.0"),
        ("terms.append(2.0", "last = terms[-1]\n            terms.append(2.0"),
        ("terms.append(2.0", "terms.append(torch.rand(2)); terms.append(2.0"),
        ("terms.append(2.0", "self.seen(terms); terms.append(2.0"),
        ("terms.append(2.0", "terms.pop(); terms.append(2.0"),
        ("terms.append(2.0", "terms.append(terms[-1]); terms.append(2.0"),
        ("return torch.stack(terms)", "self.terms = terms\n        return torch.stack(terms)"),
        ("return torch.stack(terms)", "return terms"),
        ("return torch.stack(terms)", "return torch.stack(terms, out=self.out)"),
        ("terms = [torch", "terms = [self.weights, torch"),
        ("self.order = order", "self.order = nn.Parameter(order)"),
        ("return torch.einsum", "self.order += 1\n        return torch.einsum"),
    ],
)
def test_a_list_whose_elements_may_change_is_not(was: str, now: str) -> None:
    assert POLYNOMIALS.count(was) == 1
    source = POLYNOMIALS.replace(was, now)
    call = next(line for line, text in enumerate(source.splitlines(), 1) if "einsum" in text)
    assert call not in constants_of(ast.parse(source))


def test_a_list_of_the_module_may_be_used_by_anything() -> None:
    assert constants_of(ast.parse(POLYNOMIALS))
    assert not constants_of(ast.parse(POLYNOMIALS + "\nroads = Roads(near, 3)\nall_of_them = [roads.near]\n"))


def test_a_list_that_is_added_to_often_takes_no_time_that_grows_with_its_square() -> None:
    def took_s(adds: int) -> float:
        added = "\n".join(["            terms.append(near)"] * adds)
        tree = ast.parse(POLYNOMIALS.replace("            terms.append(2.0 * near @ terms[-1] - terms[-2])", added))
        began_s = time.process_time()
        assert len(constants_of(tree)) == 2
        return time.process_time() - began_s

    assert min(took_s(3000) for _ in range(3)) < 30 * min(took_s(300) for _ in range(3)), "ten times as many"


def test_functions_that_call_each_other_end() -> None:
    source = (
        "import torch\ndef f(n):\n    return g(3)\ndef g(n):\n    return f(n)\nclass A(A):\n    def f2(self, n): pass"
    )
    assert constants_of(ast.parse(source)) == {}


def test_a_long_function_takes_no_time_that_grows_with_its_square() -> None:
    """Of 4 times as many statements 4 times as much: 16 times would fail. Costs 0.3 s."""

    def seconds(statements: int) -> float:
        lines = "".join(f"    a{i + 1} = a{i} @ a{i}\n" for i in range(statements))
        tree = ast.parse(f"import torch\ndef f(x):\n    a0 = x.exp()\n{lines}")
        began_s = time.process_time()
        constants_of(tree)
        return time.process_time() - began_s

    assert min(seconds(2000) for _ in range(3)) < 9 * min(seconds(500) for _ in range(3))


WORDS = st.sampled_from(["x", "self.near", "torch.eye(3)", "t", "relative(2)", "[1]", "self", "(lambda: x)"])


@given(st.recursive(WORDS, lambda inner: st.builds("({} @ {})".format, inner, inner), max_leaves=12))
def test_an_expression_stays_only_if_no_part_of_it_varies(expression: str) -> None:
    """Costs 0.5 s."""
    found = names_on(f"y = {expression}")
    varies = any(word in expression for word in ("x", "lambda")) or "self" in expression.replace("self.near", "")
    assert (ALL in found) == (not varies and ("@" in expression or "(" in expression))
