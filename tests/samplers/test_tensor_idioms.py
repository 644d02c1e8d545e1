"""Operations on tensors for which others do far less: found in the source alone."""

from __future__ import annotations

import ast
import textwrap

import pytest

from gpulaunch.profiler.record.line_calls import (
    PAIRS,
    PAIRS_FORWARD,
    PERMUTATION,
    SINGULAR,
    SINGULAR_FORWARD,
)
from gpulaunch.profiler.samplers.tensor_idioms import idioms_of


def told(body: str) -> dict[int, str]:
    source = "def loss(x, y):\n" + textwrap.indent(body, "    ") + "\n"
    return idioms_of(ast.parse(source))


@pytest.mark.parametrize(
    "body",
    [
        "return (x.unsqueeze(0) - x.unsqueeze(1)).pow(2).sum(-1)",
        "return ((x[:, None] - y[None]) ** 2).sum(dim=2).sqrt()",
        "return (x[:, None, :] - y[None, :, :]).norm(dim=-1)",
        "return torch.norm(x.unsqueeze(1) - y.unsqueeze(0), dim=-1)",
        "return torch.linalg.vector_norm(x[:, None] - y[None], dim=-1)",
        "return torch.sum((x[:, None] - y[None]) ** 2, -1)",
        "return (x[:, :, None] - x[:, None]).square().sum(3)",
    ],
)
def test_distances_of_all_pairs(body: str) -> None:
    assert told(body) == {2: PAIRS}


def test_differences_that_have_a_name_are_a_part_of_it() -> None:
    assert told("gap = x[:, None] - y[None]\nn = len(x)\nreturn gap.square().sum(-1)") == {2: PAIRS, 4: PAIRS}


def test_backward_does_not_go_through_what_only_chooses() -> None:
    """The codes of a VQ-VAE."""
    assert told("d = (x[:, None] - y[None]).square().sum(-1)\nreturn y[d.argmin(1)]") == {2: PAIRS_FORWARD}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("gap = x[:, None] - y[None]\nreturn gap.norm(dim=-1), gap[0]", id="used for more"),
        pytest.param("return (x[:, None] - y[:, None]).square().sum(-1)", id="no pairs"),
        pytest.param("return (x[:, None] - y).square().sum(-1)", id="not known"),
        pytest.param("return (x[:, None] - y[None]).square().sum(0)", id="over the samples"),
        pytest.param("return (x[:, None] - y[None]).square()", id="all of them"),
        pytest.param("return (x.unsqueeze(-1) - x.unsqueeze(-2)).square().sum(-1)", id="of numbers"),
        pytest.param("return (x.unsqueeze(2) - x.unsqueeze(1)).square().sum(2)", id="over the others"),
        pytest.param("return (x[:, None] - y[None]).norm(2, dim=1)", id="not over the last dimension"),
        pytest.param("gap = x[:, None] - y[None]\ngap %= box\nreturn gap.norm(dim=-1)", id="periodic"),
        pytest.param("return grad((x[:, None] - y[None]).norm(dim=-1), x, create_graph=True)", id="twice"),
        pytest.param("return np.linalg.norm(x[:, None] - y[None], axis=-1)", id="NumPy"),
        pytest.param("return torch.sum(input=x, dim=-1)", id="by keywords alone"),
        pytest.param("return (x[:, None] * y[None]).square().sum(-1)", id="products"),
        pytest.param("return (x[:, None] - y[None]).sum(-1)", id="no distance"),
        pytest.param("return (-(x[:, None] - y[None]).square()).exp().sum(-1)", id="a kernel of each number"),
    ],
)
def test_other_differences(body: str) -> None:
    assert told(body) == {}


@pytest.mark.parametrize(
    ("expression", "is_told"),
    [
        ("data[torch.randperm(len(data))[:32]]", True),
        ("torch.randperm(n, generator=g)[: self.batch]", True),
        ("x[torch.randperm(len(x))]", False),
        ("order[:32]", False),
        ("torch.randperm(n)[32:]", False),
        ("torch.randperm(n)[: int(0.75 * n)]", False),
        ("torch.randperm(n)[:-1]", False),
    ],
)
def test_a_permutation_of_everything_for_a_few(expression: str, *, is_told: bool) -> None:
    assert told(f"return {expression}") == ({2: PERMUTATION} if is_told else {})


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("return torch.linalg.matrix_norm(x, ord=2)", {2}),
        ("return torch.linalg.matrix_norm(x, 2).square()", {2}),
        ("return torch.linalg.svdvals(x).max()", {2}),
        ("return torch.linalg.svdvals(x)[..., 0]", {2}),
        ("return torch.svd(x)[1][0]", {2}),
        ("return torch.linalg.svd(x, full_matrices=False).S.amax()", {2}),
        ("s = torch.linalg.svdvals(x)\nreturn s[0] + s.max()", {2}),
        ("_, s, _ = torch.linalg.svd(x)\nn = 3\nreturn s[0]", {2}),
        ("return torch.linalg.matrix_norm(x)", set()),
        ("return torch.linalg.matrix_norm(x, 'nuc')", set()),
        ("return torch.linalg.svdvals(x).sum()", set()),
        ("return torch.linalg.svdvals(x)[1]", set()),
        ("s = torch.linalg.svdvals(x)\nreturn s[0] / s[-1]", set()),
        ("u, s, v = torch.linalg.svd(x)\nreturn s.max(), (s > 0.1).sum()", set()),
        ("return torch.linalg.svd(x)[0][0]", set()),
    ],
)
def test_all_singular_values_for_the_largest(body: str, lines: set[int]) -> None:
    assert told(body) == dict.fromkeys(lines, SINGULAR)


@pytest.mark.parametrize(
    "source",
    [
        "with torch.no_grad():\n    x = torch.linalg.matrix_norm(w, 2)\n",
        "@torch.inference_mode()\ndef norm(w): return torch.linalg.svdvals(w)[0]\n",
    ],
)
def test_backward_does_not_go_through_singular_values_that_are_only_shown(source: str) -> None:
    assert idioms_of(ast.parse(source)) == {2: SINGULAR_FORWARD}


def test_a_script_without_functions_is_read_too() -> None:
    assert idioms_of(ast.parse("d = (x[:, None] - y[None]).square().sum(-1)\n")) == {1: PAIRS}
