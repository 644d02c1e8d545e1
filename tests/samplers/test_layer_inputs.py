"""What layers of a model compute alike is found in the source, and nothing that may differ between them."""

from __future__ import annotations

import ast

import pytest

from gpulaunch.profiler.samplers.constants import constants_of_layers

NORMALIZED = """
def normalized(edges, n):
    loops = torch.arange(n).expand(2, n)
    both = torch.cat([edges, loops], dim=1)
    degree = torch.zeros(n).index_add_(0, both[0], torch.ones(both.shape[1]))
    weights = degree[both[0]].rsqrt() * degree[both[1]].rsqrt()
    return torch.sparse_coo_tensor(both, weights, (n, n)).coalesce()
"""
LAYER = """
class Layer(nn.Module):
    def __init__(self, width):
        self.lin = nn.Linear(width, width)
        self.width = width
    def forward(self, x, edges):
        adj = normalized(edges, len(x))
        return torch.sparse.mm(adj, self.lin(x))
"""
MODEL = """
class Model(nn.Module):
    def __init__(self):
        self.first = Layer(8)
        self.layers = nn.ModuleList(Layer(8) for _ in range(3))
    def forward(self, x, edges):
        for layer in self.layers:
            x = layer(x, edges)
        return self.first(x, edges)
"""


CALL = "adj = normalized(edges, len(x))"


def told(*changes: tuple[str, str]) -> list[str]:
    """The lines that are told, of the program after the changes."""
    source = "import torch\nfrom torch import nn\n" + NORMALIZED + LAYER + MODEL
    for before, after in changes:
        assert before in source
        source = source.replace(before, after)
    lines = source.splitlines()
    return [lines[line - 1].strip() for line in sorted(constants_of_layers(ast.parse(source)))]


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [("len(x)", "x.shape[0]")],
        [("len(x)", "x.size(0)")],
        [("        return self.first(x, edges)", "        return x")],
        [("for layer in self.layers:\n            x = layer(x, edges)", "x = self.first(x, edges)")],
        [("for layer in self.layers", "for n, layer in enumerate(self.layers)")],
        [(CALL, "n = x.shape[0]\n        adj = normalized(edges, n)")],
    ],
    ids=["a list and one", "the first dimension", "its size", "a list", "one, twice", "counted", "with a name"],
)
def test_what_depends_on_an_argument_of_all_layers_is_told(changes: list[tuple[str, str]]) -> None:
    assert len(told(*changes)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([("len(x)", "x.shape[1]")], id="another dimension, which may differ"),
        pytest.param([(CALL, "n = x.shape[1]\n        adj = normalized(edges, n)")], id="another one with a name"),
        pytest.param([(CALL, "_, n = x.shape\n        adj = normalized(edges, n)")], id="one of several names"),
        pytest.param([(CALL, "n = x.shape[-2:]\n        adj = torch.cdist(edges, edges).repeat(n)")], id="two of them"),
        pytest.param([("len(x)", "self.width")], id="a number of the layer"),
        pytest.param(
            [("normalized(edges, len(x))", "normalized(self.lin(edges), len(x))")], id="through its parameters"
        ),
        pytest.param(
            [("normalized(edges, len(x))", "normalized(x, len(edges))")], id="what the layer before has given"
        ),
        pytest.param([("x = layer(x, edges)", "x, edges = layer(x, edges)")], id="a graph that changes"),
        pytest.param([("x = layer(x, edges)", "x = layer(x, edges)\n            edges[0] = 0")], id="changed in place"),
        pytest.param([("x = layer(x, edges)", "x = layer(x, drop(edges))")], id="what is drawn"),
        pytest.param([("x = layer(x, edges)", "drop_(edges)\n            x = layer(x, edges)")], id="given elsewhere"),
        pytest.param(
            [("x = layer(x, edges)", "x = layer(x, x)"), ("return self.first(x, edges)", "return x")], id="of itself"
        ),
        pytest.param([("self.first(x, edges)", "self.first(x, x)")], id="one layer has another"),
        pytest.param([("both[0], torch.ones", "both[0], torch.rand")], id="drawn in the function"),
        pytest.param([("torch.cat([edges, loops], dim=1)", "self_loops(edges, loops)")], id="by an unknown function"),
        pytest.param([("    loops =", "    edges[0] = 0\n    loops =")], id="changed in the function"),
        pytest.param([(CALL, CALL + "\n        edges.add_(1)")], id="changed in the layer"),
        pytest.param([("adj = normalized", "edges = edges + 1\n        adj = normalized")], id="of its own"),
        pytest.param(
            [("for layer in self.layers:\n            x = layer(x, edges)", "x = self.lin(x)")], id="one layer, once"
        ),
    ],
)
def test_what_may_differ_between_layers_is_not(changes: list[tuple[str, str]]) -> None:
    assert told(*changes) == []


OWN = """
        self.register_buffer("mask", torch.ones(9))
    def own(self, edges):
        return torch.cdist(edges, {other})
    def forward(self, x, edges):
"""


@pytest.mark.parametrize(("other", "is_told"), [("edges", True), ("self.mask", False)])
def test_a_method_may_use_what_is_its_layers(other: str, *, is_told: bool) -> None:
    lines = told(
        ("\n    def forward(self, x, edges):\n        adj", OWN.format(other=other) + "        adj"),
        (CALL, "adj = self.own(edges)"),
    )

    assert lines == ["adj = self.own(edges)"] * is_told
