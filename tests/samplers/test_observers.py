"""Functions that only compute statistics of tensors: found in the source alone."""

from __future__ import annotations

import ast

import pytest

from gpulaunch.profiler.samplers.observers import observers_of


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def hook(m, i, o):\n    stats[m] = o.detach().std()\n", {1, 2}),
        (
            "def hook(m, i, o):\n    if not on: return\n    seen.append(o.abs().max().item())\n    return None\n",
            {1, 2, 3, 4},
        ),
        ("def make(n):\n    def hook(m, i, o):\n        s[n] = o.detach().mean()\n    return hook\n", {2, 3}),
        ("@torch.no_grad()\ndef hook(m, i, o):\n    self.norms[m] = o.norm()\n", {2, 3}),
        ("def hook(m, i, o):\n    features.append(o.detach())\n", set()),
        ("def hook(m, i, o):\n    penalty.append(o.square().mean())\n", set()),
        ("def hook(m, i, o):\n    return o - o.detach().mean()\n", set()),
        ("def batches(x):\n    yield x.detach().mean()\n", set()),
        ("async def hook(m, i, o):\n    s[m] = o.detach().mean()\n", set()),
    ],
)
def test_a_function_that_returns_nothing_and_computes_without_gradients_observes(source: str, lines: set[int]) -> None:
    assert observers_of(ast.parse(source)) == lines
