"""Which functions run a network several times on the same input."""

from __future__ import annotations

import ast

import pytest

from gpulaunch.profiler.samplers.known_models import Models
from gpulaunch.profiler.samplers.same_passes import lines_of_same_passes

DERIVATIVES = """
class Net(nn.Module):
    def __init__(self):
        self.layers = nn.Linear(2, 1)
    def forward(self, x, t):
        return self.layers(torch.cat([x, t], 1))

def grad(y, x):
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

class Flow:
    def __init__(self, net):
        self.net = net
    def u(self, x, t):
        return self.net(x, t)
    def u_x(self, x, t):
        return grad(self.u(x, t), x)
    def residual(self, x, t):
        return grad(self.u(x, t), t) + self.u_x(x, t)

flow = Flow(Net())
flow.net = Net()
"""
TWICE = """
class Net(nn.Module):
    def __init__(self):
        self.layer = nn.Linear(2, 1)
    def forward(self, x):
        return self.layer(x)

def loss(batch):
    x = batch["x"]
    error = (net(x) - batch["y"]).square().mean()
    size = net(x).abs().mean()
    return error + size

net = Net()
"""


def told(source: str) -> set[str]:
    source = "import torch\nfrom torch import nn\n" + source
    lines = source.splitlines()
    tree = ast.parse(source)
    return {lines[line - 1].strip() for line in lines_of_same_passes(tree, Models(tree))}


def test_derivatives_that_each_run_the_network() -> None:
    assert told(DERIVATIVES) == {"return grad(self.u(x, t), t) + self.u_x(x, t)"}


def test_two_passes_in_one_function() -> None:
    assert told(TWICE) == {
        'error = (net(x) - batch["y"]).square().mean()',
        "size = net(x).abs().mean()",
    }


@pytest.mark.parametrize(
    ("source", "was", "now"),
    [
        (DERIVATIVES, "self.u_x(x, t)", "self.u_x(x, 2 * t)"),
        (DERIVATIVES, "return grad(self.u(x, t), t) + self.u_x(x, t)", "return grad(self.u(x, t), t) + self.u_x(t, x)"),
        (DERIVATIVES, "self.layers = nn.Linear(2, 1)", "self.layers = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.1))"),
        (TWICE, "return self.layer(x)", "return self.layer(x + torch.randn_like(x))"),
        (TWICE, "return self.layer(x)", "self.seen = x\n        return self.layer(x)"),
        (TWICE, "    size =", "    x = x.flip(0)\n    size ="),
        (TWICE, "    size =", "    optimizer.first_step()\n    size ="),
        (TWICE, "    size =", "    error.backward()\n    size ="),
        (TWICE, "    size = net(x)", "    size = other(x)"),
        (TWICE, "net = Net()", "net = build()"),
        (TWICE, "    size = net(x).abs().mean()", "    size = error if small else 0"),
        (TWICE, "    size =", "    for w in net.parameters():\n        w.add_(noise(w))\n    size ="),
        (TWICE, "    size =", "    hook = net.register_forward_hook(drop_head)\n    size ="),
        (TWICE, "    size =", "    net.hard = False\n    size ="),
        (TWICE, "    size =", "    x.sub_(x.mean())\n    size ="),
        (TWICE, "    size = net(x)", "    size = other.net(x)"),
    ],
    ids=[
        *("another input", "turned around", "dropout", "noise", "it keeps a state", "the input is another one by then"),
        *("the weights are others by then", "it trains", "another network", "an unknown network", "one pass"),
        *("noise on the weights", "a hook", "another mode", "the input changes", "that of another object"),
    ],
)
def test_passes_that_differ_are_not_told(source: str, was: str, now: str) -> None:
    assert was in source
    assert told(source.replace(was, now)) == set()
