"""Forward passes that a step makes again with the same result: found in the source alone."""

from __future__ import annotations

import ast
import textwrap

import pytest

from gpulaunch.profiler.record.line_calls import FORWARD_AGAIN, FORWARD_TWICE
from gpulaunch.profiler.samplers.repeated_passes import repeated_passes

MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, {0})
    def forward(self, x):
        return self.layer(x){1}
class Autoencoder(nn.Module):
    def step(self, x, y, net, optimizer):
"""


def told(body: str, model: str = MODEL.format("8", "")) -> dict[str, str]:
    """The lines of a body that are told, and what each is."""
    source = model + textwrap.indent(body, "        ") + "\n"
    lines = source.splitlines()
    return {lines[line - 1].strip(): what for line, what in repeated_passes(ast.parse(source)).items()}


@pytest.mark.parametrize(
    "body",
    [
        "out = net(x)\nwith torch.no_grad():\n    right = (net(x).argmax(1) == y).sum()",
        "loss = ce(self(x), y)\nself.log('loss', loss)\nright = (self(x).argmax(1) == y).float().mean()",
        "with torch.no_grad():\n    right = accuracy(self.net(x), y)\nwith autocast():\n    loss = ce(self.net(x), y)",
        "loss = ce(net(x), y)\nloss.backward()\noptimizer.step()\nright = net(x).topk(5)",
    ],
)
def test_a_pass_that_is_only_compared(body: str) -> None:
    (line,) = [each.strip() for each in body.splitlines() if "right" in each]
    assert told(body) == {line: FORWARD_AGAIN}


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("mean = self.encode(x)[0]\nspread = self.encode(x)[1]", 1),
        ("loss = ce(net(x), y)\nprint(loss)\nloss = loss + 0.1 * net(x).square().mean()", 2),
        ("a = net(x)\nif y is None:\n    b = net(x)", 2),
        ("a = model.encode(x)\nwith autocast():\n    b = model.encode(x)", 2),
    ],
)
def test_a_pass_for_the_loss_that_has_been_made(body: str, line: int) -> None:
    assert told(body) == {body.splitlines()[line].strip(): FORWARD_TWICE}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("a = net(x)\nwith torch.no_grad():\n    b = net(x).softmax(1)", id="the second is a target"),
        pytest.param("a = net(x)\nx, y = next(batches)\nb = net(x)", id="another batch"),
        pytest.param("a = net(x)\nnet.eval()\nb = net(x)", id="in eval mode"),
        pytest.param("a = net(x)\noptimizer.step()\nb = net(x)", id="after an update"),
        pytest.param("a = net(x)\noptimizer.first_step(zero_grad=True)\nb = net(x)", id="perturbed"),
        pytest.param("a = net(x)\ndisable_running_stats(net)\nb = net(x)", id="changed by a function"),
        pytest.param("a = net(x)\nfor _ in range(3):\n    b = net(x)\n    b.sum().backward()", id="in a loop"),
        pytest.param("for _ in range(3):\n    b = net(x)\na = net(x)", id="after a loop"),
        pytest.param("if y is None:\n    a = net(x)\nelse:\n    a = net(x) + 1", id="one of the two"),
        pytest.param("def again(x):\n    return net(x)\na = net(x)", id="in another function"),
        pytest.param("a = teacher(x)\nb = net(x)", id="another model"),
        pytest.param("a = x.size(0)\nb = net(x) / x.size(0)", id="no model"),
        pytest.param("a = len(x)\nb = net(x) / len(x)", id="a builtin function"),
    ],
)
def test_passes_that_may_differ(body: str) -> None:
    assert told(body) == {}


@pytest.mark.parametrize(
    "model",
    [
        MODEL.format("8", "+ torch.randn_like(x)"),
        MODEL.format("8)\n        self.drop = nn.Dropout(0.1", ""),
        MODEL.format("8)\n        self.body = nn.TransformerEncoderLayer(8, 1", ""),
        "from transformers import AutoModel\n" + MODEL.format("8", ""),
        "from .models import Encoder\n" + MODEL.format("8", ""),
        "import models\n" + MODEL.format("8", ""),
    ],
    ids=["noise", "dropout", "dropout by default", "of a package", "of another file", "of another module"],
)
def test_of_a_model_that_may_be_random_only_metrics_are_told(model: str) -> None:
    """SimCSE and R-Drop want two passes of the same batch."""
    assert told("a = net(x)\nb = net(x)", model) == {}
    assert told("a = net(x)\nb = net(x).argmax(1)", model) == {"b = net(x).argmax(1)": FORWARD_AGAIN}
