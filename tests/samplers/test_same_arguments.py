"""Calls on the stack of a step whose arguments are the same in every step: found in the source along a stack."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulaunch.profiler.daemon.stack_samples import StackSamples
from gpulaunch.profiler.record import RankPlace
from gpulaunch.profiler.stack import Frame

PACKAGES = "/usr/lib/python3.11/site-packages"
CALLS = Frame("Module._call_impl", f"{PACKAGES}/torch/nn/modules/module.py", 1790)
LAYERS = Frame("Sequential.forward", f"{PACKAGES}/torch/nn/modules/container.py", 250)

GRAPH = """
import torch
import torch.nn.functional as F
from torch import nn
STEPS = 9
def normalised(edges, n):
    a = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (n, n)).coalesce()
    index, values = a.indices(), a.values()
    degree = torch.zeros(n).index_add_(0, index[0], values)
    return torch.sparse_coo_tensor(index, values * degree[index[0]].pow(-0.5), (n, n))
class Conv(nn.Module):
    def forward(self, x, edges):
        return torch.sparse.mm(normalised(edges, x.shape[0]), self.linear(x))
class Net(nn.Module):
    def forward(self, x, edges):
        x = F.dropout(F.relu(self.first(x, edges)), 0.3)
        return self.last(x, edges)
def main(words, edges, optimizer):
    net = Net()
    for step in range(STEPS):
        loss = F.cross_entropy(net(words, edges), words)
        loss.backward()
        optimizer.step()
"""

POLICY = """
import torch
def log_prob(policy, states, actions):
    with torch.no_grad():
        return policy(states).log_prob(actions).sum(-1)
def main(policy, old, optimizer):
    optimizer = torch.optim.Adam(policy.parameters())
    for _ in range(100):
        states, actions = collect(policy)
        old.load_state_dict(policy.state_dict())
        for part in torch.randperm(len(states)).split(64):
            before = log_prob(old, states, actions)
            loss = loss_of(policy(states[part]), before[part])
            loss.backward()
            optimizer.step()
"""


def told(tmp_path: Path, source: str, *stack: tuple[str, str] | Frame) -> str:
    """What is on the line that is told, of a stack of names of functions and of what is on their lines, the outermost
    first."""
    program = tmp_path / "train.py"
    program.write_text(source)
    lines = source.splitlines()

    def frame(each: tuple[str, str] | Frame) -> Frame:
        if isinstance(each, Frame):
            return each
        (number,) = [at for at, line in enumerate(lines, 1) if each[1] in line]
        return Frame(each[0], str(program), number)

    samples = StackSamples(Path("/"))
    samples.add(RankPlace(rank=0, local_rank=0, pid=os.getpid()), "forward", [frame(each) for each in reversed(stack)])
    assert set(samples.tally.calls.values()) <= {"the same in every step"}
    return next((lines[int(place.rpartition(":")[2]) - 1].strip() for _, place in samples.tally.calling), "")


DOWN_TO_THE_GRAPH = (
    ("main", "net(words"),
    CALLS,
    ("Net.forward", "self.first"),
    CALLS,
    ("Conv.forward", "normalised(edges, x"),
    ("normalised", "index_add_"),
)


def test_what_a_layer_computes_of_an_argument_that_the_loop_never_changes(tmp_path: Path) -> None:
    assert told(tmp_path, GRAPH, *DOWN_TO_THE_GRAPH).startswith("return torch.sparse.mm(")


def test_what_a_frozen_model_gives_for_the_same_batch(tmp_path: Path) -> None:
    assert told(tmp_path, POLICY, ("main", "log_prob(old"), ("log_prob", "return policy")).startswith("before = ")


@pytest.mark.parametrize(
    ("was", "now"),
    [
        pytest.param("for step in range(STEPS):", "for edges in graphs:", id="another graph in each step"),
        pytest.param("optimizer.step()", "edges = drop(edges)", id="set in the loop"),
        pytest.param("optimizer.step()", "edges[0] = 1", id="changed in the loop"),
        pytest.param("optimizer.step()", "edges.clamp_(0)", id="changed by a method"),
        pytest.param("optimizer.step()", "rewire(edges)", id="given to what may change it"),
        pytest.param("loss.backward()", "pass", id="a loop that makes no steps"),
        pytest.param("self.first(x, edges)", "self.first(x, self.sample(edges))", id="computed in the model"),
        pytest.param(
            "        x = F.dropout", "        edges = edges[:, 1:]\n        x = F.dropout", id="set in the model"
        ),
        pytest.param("torch.ones(edges.shape[1])", "torch.rand(edges.shape[1])", id="random"),
        pytest.param("return torch.sparse_coo", "CACHE[n] = a\n    return torch.sparse_coo", id="kept elsewhere"),
        pytest.param("index, values = a", "edges[0] = 0\n    index, values = a", id="changes its argument"),
        pytest.param("degree = torch", "degree = graph.degree(n) + torch", id="of what it is not given"),
        pytest.param("    net = Net()", "    net = Net(); best = torch.optim.Adam([edges])", id="trained"),
        pytest.param("    net = Net()", "    net = Net(); edges.requires_grad_()", id="trained by a name"),
        pytest.param("    net = Net()", "    net = Net(); w = torch.ones(3, requires_grad=True)", id="perhaps trained"),
        pytest.param("optimizer.step()", "for e in edges: e.data.sub_(0.1)", id="changed by parts"),
        pytest.param("def normalised(", "@cache\ndef normalised(", id="remembered"),
    ],
)
def test_what_may_differ(tmp_path: Path, was: str, now: str) -> None:
    assert GRAPH.count(was) == 1
    assert told(tmp_path, GRAPH.replace(was, now), *DOWN_TO_THE_GRAPH) == ""


def test_what_a_package_calls_has_arguments_that_are_not_known(tmp_path: Path) -> None:
    stack = list(DOWN_TO_THE_GRAPH)
    stack[3:4] = [CALLS, LAYERS, CALLS]
    assert told(tmp_path, GRAPH, *stack) == ""


@pytest.mark.parametrize(
    ("was", "now"),
    [
        pytest.param("log_prob(old,", "log_prob(policy,", id="the model that is trained"),
        pytest.param("            optimizer.step()", "            average(old, policy)", id="an average of it"),
        pytest.param("torch.optim.Adam(policy.", "torch.optim.Adam(old.", id="trained, too"),
        pytest.param("    with torch.no_grad():", "    if True:", id="with gradients"),
        pytest.param("import torch\n", "import torch\ndrop = torch.nn.Dropout(0.1)\n", id="dropout"),
        pytest.param("(old, states, actions)", "(old, states[part], actions)", id="another batch"),
    ],
)
def test_what_a_model_may_give_anew(tmp_path: Path, was: str, now: str) -> None:
    assert POLICY.count(was) == 1
    call = ("main", "before = log_prob(")
    assert told(tmp_path, POLICY.replace(was, now), call, ("log_prob", "return policy")) == ""
