"""Distances of all pairs that are computed from their differences: found in the source alone."""

from __future__ import annotations

import ast
import textwrap

import pytest

from gpulaunch.profiler.samplers.pairwise import distances_of_pairs


def told(body: str) -> dict[int, bool]:
    source = "def loss(x, y):\n" + textwrap.indent(body, "    ") + "\n"
    return distances_of_pairs(ast.parse(source))


@pytest.mark.parametrize(
    "body",
    [
        "return (x.unsqueeze(0) - x.unsqueeze(1)).pow(2).sum(-1)",
        "return ((x[:, None] - y[None]) ** 2).sum(dim=2).sqrt()",
        "return (x[:, None, :] - y[None, :, :]).norm(dim=-1)",
        "return torch.norm(x.unsqueeze(1) - y.unsqueeze(0), dim=-1)",
        "return torch.linalg.vector_norm(x[:, None] - y[None], dim=-1)",
        "return torch.sum((x[:, None] - y[None]) ** 2, -1)",
        "return (x[:, :, None] - x[:, None]).abs().sum(-1)",
    ],
)
def test_distances_of_all_pairs(body: str) -> None:
    assert told(body) == {2: True}


def test_differences_that_have_a_name_are_a_part_of_it() -> None:
    assert told("gap = x[:, None] - y[None]\nn = len(x)\nreturn gap.square().sum(-1)") == {2: True, 4: True}


def test_backward_does_not_go_through_what_only_chooses() -> None:
    """The codes of a VQ-VAE."""
    assert told("d = (x[:, None] - y[None]).square().sum(-1)\nreturn y[d.argmin(1)]") == {2: False}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("gap = x[:, None] - y[None]\nreturn gap.norm(dim=-1), gap[0]", id="used for more"),
        pytest.param("return (x[:, None] - y[:, None]).square().sum(-1)", id="no pairs"),
        pytest.param("return (x[:, None] - y).square().sum(-1)", id="not known"),
        pytest.param("return (x[:, None] - y[None]).square().sum(0)", id="over the samples"),
        pytest.param("return (x[:, None] - y[None]).square()", id="all of them"),
        pytest.param("return (x[:, None] * y[None]).square().sum(-1)", id="products"),
        pytest.param("return (x[:, None] - y[None]).sum(-1)", id="no distance"),
        pytest.param("return (-(x[:, None] - y[None]).square()).exp().sum(-1)", id="a kernel of each number"),
    ],
)
def test_other_differences(body: str) -> None:
    assert told(body) == {}
