"""Forward passes that a step makes again only to compare predictions: found in the source alone."""

from __future__ import annotations

import ast
import textwrap
import time

import pytest

from gpulaunch.profiler.samplers.repeated_passes import passes_for_metrics

MODEL = """
import torch
class Model:
    def step(self, x, y, net, criterion, optimizer):
"""


def told(body: str) -> set[str]:
    """The lines of a body that are told."""
    source = MODEL + textwrap.indent(body, "        ") + "\n"
    lines = source.splitlines()
    return {lines[line - 1].strip() for line in passes_for_metrics(ast.parse(source))}


@pytest.mark.parametrize(
    "body",
    [
        "out = net(x)\nwith torch.no_grad():\n    right = (net(x).argmax(1) == y).sum()",
        "loss = criterion(self(x), y)\nself.log('loss', loss)\nright = (self(x).argmax(1) == y).float().mean()",
        "right = accuracy(self.net(x), y)\nwith autocast():\n    loss = criterion(self.net(x), y)",
        "a = criterion(net(x), y)\nwith no_grad():\n    if y is not None:\n        right = net(x).argmax(1).eq(y)",
        "out = net(x.to(device))\nright = net(x.to(device)).argmax(1)\nshown = (right == y).sum()",
    ],
)
def test_a_pass_that_is_only_compared(body: str) -> None:
    assert told(body) == {next(each.strip() for each in body.splitlines() if "right =" in each)}


def test_a_trainer_makes_its_own_pass() -> None:
    passes = "loss, out = super().compute_loss(net, x, return_outputs=True)\nlogits = net(**x).logits\n"

    assert told(passes + "right = (logits.argmax(-1) == y).sum()\nseen = len(logits)") == {"logits = net(**x).logits"}
    assert told(passes + "loss = loss + (logits - y).square().mean()") == set()


@pytest.mark.parametrize(
    "again", ["plain = super().compute_loss(net, x)", "plain = criterion(net(**x), y)", "plain = net_loss(net(**x))"]
)
def test_a_pass_for_a_loss_that_is_only_logged(again: str) -> None:
    passes = f"out = net(**x)\nloss = weighted(out.logits, y)\nif seen:\n    {again}\n"

    assert told(passes + "self.total += plain.detach()\nself.log('plain', plain.item())") == {again}
    assert told(passes + "loss = loss + 0.1 * plain\nself.log('plain', plain.item())") == set()
    assert told(passes + "self.gap = (out.logits.detach() - plain.detach()).abs()") == set()
    assert told(passes + "if plain > 9 * plain.item():\n    self.skip()") == set()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("a = net(x)\nwith torch.no_grad():\n    b = net(x).softmax(1)", id="a target"),
        pytest.param("a = net(x)\nb = net(x).argmax(1)\nloss = criterion(a, b)", id="a pseudo label"),
        pytest.param("a = net(x)\nx, y = next(batches)\nb = (net(x).argmax(1) == y)", id="another batch"),
        pytest.param("a = net(x)\nx[0] = 0\nb = (net(x).argmax(1) == y)", id="a part of it changed"),
        pytest.param("a = net(x)\nx.data = x - g\nb = (net(x).argmax(1) == y)", id="attacked"),
        pytest.param("a = net(x)\nnet.eval()\nb = (net(x).argmax(1) == y)", id="in eval mode"),
        pytest.param("a = net(x)\nset_mode(net)\nb = (net(x).argmax(1) == y)", id="in a mode set elsewhere"),
        pytest.param("a = net(x)\nwith evaluating(net):\n    b = (net(x).argmax(1) == y)", id="in a context"),
        pytest.param("a = net(x)\noptimizer.step()\nb = (net(x).argmax(1) == y)", id="after an update"),
        pytest.param(
            "a = net(x)\nif y is None:\n    optimizer.first_step()\nb = (net(x).argmax(1) == y)", id="after a condition"
        ),
        pytest.param("a = net(x)\nc = optimizer.step(f)\nb = (net(x).argmax(1) == y)", id="after an assigned update"),
        pytest.param("a = net(x)\nx.data.add_(g)\nb = (net(x).argmax(1) == y)", id="attacked by a method"),
        pytest.param("a = net(x)\nnet.adapt(a)\nb = (net(x).argmax(1) == y)", id="adapted"),
        pytest.param("a = net(x)\npruner.enable()\nb = (net(x).argmax(1) == y)", id="pruned"),
        pytest.param("a = net(x)\nfor _ in range(3):\n    b = (net(x).argmax(1) == y)", id="in a loop"),
        pytest.param("if y is None:\n    a = net(x)\nelse:\n    b = (net(x).argmax(1) == y)", id="one of the two"),
        pytest.param(
            "match y:\n    case 1:\n        a = net(x)\n    case 2:\n        b = (net(x).argmax(1) == y)", id="match"
        ),
        pytest.param("def again(x):\n    return net(x)\na = (net(x).argmax(1) == y)", id="in another function"),
        pytest.param("a = self.teacher(x)\nb = (net(x).argmax(1) == y)", id="another model"),
        pytest.param("a = len(x)\nb = (len(x) == y)", id="no model, but told only above one"),
        pytest.param("a = net(x)\nb = criterion(net(x), (y == 1).float())", id="a loss"),
        pytest.param("a = net(x)\nloss = (net(x).argmax(1) == y).sum()", id="called a loss"),
        pytest.param("a = net(x)\nb = net(x).argmax(1)\nsame = b == a.argmax(1)", id="whether both agree"),
        pytest.param("a = net(aug(x))\nb = (net(aug(x)).argmax(1) == y)", id="of what is drawn"),
        pytest.param("a = net(next(it))\nb = (net(next(it)).argmax(1) == y)", id="of what is taken"),
        pytest.param("a = net(x)\nb = (net(x).argmax(1) == y) if y else 0", id="perhaps"),
        pytest.param("a = net(x)\nb = [(net(x).argmax(1) == y) for x in parts]", id="another x"),
        pytest.param("a = net(x)\nf(lambda: (net(x).argmax(1) == y))", id="later"),
        pytest.param(
            "a = super().compute_loss(net, x)\nb = (net(**z).argmax(1) == y)", id="a Trainer's, of another batch"
        ),
        pytest.param("a = super().compute_cost(net, x)\nb = (net(**x).argmax(1) == y)", id="another method"),
        pytest.param("a = net(x)\nb = net(x)\nc = (b == y)\nd = len(b)", id="compared as it is"),
        pytest.param("a = net(x) + (net(x).argmax(1) == y)", id="both on one line"),
    ],
)
def test_what_may_differ_or_is_needed(body: str) -> None:
    assert told(body) - {"b = (len(x) == y)"} == set()


def test_a_long_function_takes_no_time_that_grows_with_its_square() -> None:
    """Of 4 times as many statements 4 times as much: 16 times would fail. Costs 0.5 s."""

    def seconds(statements: int) -> float:
        lines = "".join(f"    check({i}, x)\n" for i in range(statements))
        several = ", ".join(f"g(x{i}, y)" for i in range(statements))
        tree = ast.parse(f"def f(x):\n{lines}    z = [{several}]\n")
        began_s = time.process_time()
        passes_for_metrics(tree)
        return time.process_time() - began_s

    assert min(seconds(2000) for _ in range(3)) < 9 * min(seconds(500) for _ in range(3))
