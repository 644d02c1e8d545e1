"""Decomposed matrices, statistics of averages, dense targets, compressed gradients: which lines are told. No torch."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from gpulaunch.profiler.daemon.stack_samples import StackSamples
from gpulaunch.profiler.record import RankPlace
from gpulaunch.profiler.record.line_calls import COMPRESSES, DECOMPOSES, NORM_STATISTICS
from gpulaunch.profiler.samplers.averaged_models import lines_of_updates
from gpulaunch.profiler.samplers.compressed_gradients import lines_of_compression
from gpulaunch.profiler.samplers.dense_targets import lines_of_dense_targets
from gpulaunch.profiler.samplers.matrix_decompositions import lines_of_decompositions
from gpulaunch.profiler.stack import Frame

TORCH = "/usr/lib/python3/site-packages/torch"
SHAMPOO = """
def root(factor):
    values, vectors = torch.linalg.eigh(factor)
    return vectors * values
def whiten(data):
    return torch.linalg.svd(data)
class Shampoo(torch.optim.Optimizer):
    def step(self, closure=None):
        for p in self.parameters():
            self.state[p].addmm_(p.grad, p.grad.T)
            p.add_(root(self.state[p]) @ p.grad)
"""
AVERAGE = """
class Bench:
    def __init__(self):
        self.averaged = AveragedModel(self.model)
    def fit(self):
        while self.train_epoch():
            self.averaged.update_parameters(self.model)
            update_bn(self.loader, self.averaged)
        update_bn(self.loader, self.averaged)
        save(self.averaged)
"""
SMOOTHED = """
class Smoothing(nn.Module):
    def __init__(self):
        self.criterion = nn.KLDivLoss(reduction="sum")
    def forward(self, x, target):
        smoothed = x.data.clone()
        smoothed.fill_(self.smoothing / (self.size - 2))
        smoothed.scatter_(1, target.data.unsqueeze(1), self.confidence)
        return self.criterion(x, smoothed.detach())
"""
COMPRESSED = """
def largest(state, bucket):
    flat = bucket.buffer()
    where = flat.abs().topk(100).indices
    dist.all_gather(all_where, where)
model.register_comm_hook(State(), largest)
"""


@pytest.mark.parametrize(
    ("was", "now", "lines"),
    [
        ("", "", {3}),
        ("torch.optim.Optimizer", "nn.Module", set[int]()),
        ("torch.linalg.eigh(factor)", "power_iteration(factor)", set[int]()),
        ("            p.add_(root", "            torch.linalg.eigvalsh(p)\n            p.add_(root", {3, 11}),
        ("torch.linalg.eigh(factor)", "torch.linalg.svd(momentum)", set[int]()),
        ("torch.linalg.eigh(factor)", "torch.linalg.eigh(momentum.T @ momentum)", set[int]()),
        ("torch.linalg.eigh(factor)", "torch.linalg.eigh(hessian(closure))", set[int]()),
        ("            self.state[p].addmm_(p.grad, p.grad.T)\n", "", set[int]()),
        ("addmm_(p.grad, p.grad.T)", "lerp_(p.grad @ p.grad.T, 0.1)", {3}),
        ("addmm_(p.grad, p.grad.T)", "lerp_(p.grad, 0.1)", set[int]()),
        ("torch.linalg.eigh(factor)", "torch.linalg.qr(parameter)", set[int]()),
        ("torch.linalg.eigh(factor)", "torch.linalg.inv(cayley)", set[int]()),
        ("def whiten(data):", "def whiten(data):\n    return root(data)", {3}),
    ],
)
def test_matrices_that_an_optimizer_decomposes(was: str, now: str, lines: set[int]) -> None:
    assert was in SHAMPOO
    assert lines_of_decompositions(ast.parse(SHAMPOO.replace(was, now) if was else SHAMPOO)) == lines


@pytest.mark.parametrize(
    ("was", "now", "lines"),
    [
        ("", "", {8}),
        ("self.train_epoch()", "self.train_epoch(self.averaged)", set[int]()),
        (
            "            update_bn(self.loader, self.averaged)\n",
            "            update_bn(self.loader, self.averaged)\n            self.validate(self.averaged)\n",
            set[int](),
        ),
        ("class Bench:", "def test(bench):\n    return bench.averaged(1)\nclass Bench:", set[int]()),
        ("AveragedModel(self.model)", "AveragedModel(self.model)\n        self.test = Test(self.averaged)", set[int]()),
        ("class Bench:", "def test(bench):\n    return getattr(bench, 'averaged')(1)\nclass Bench:", set[int]()),
        ("while self.train_epoch():", "if self.train_epoch():", set[int]()),
        ("save(self.averaged)", "evaluate(self.averaged)", {8}),
        ("save(self.averaged)", "return 1\n    def validate(self):\n        return score(self.averaged)", set[int]()),
        ("class Bench:", "class Bench(Trainer):", set[int]()),
        ("            update_bn", "            if self.is_last():\n                update_bn", set[int]()),
        ("            update_bn", "            if USE_SWA:\n                update_bn", {9}),
        (
            "            update_bn(self.loader, self.averaged)\n",
            "            if done:\n                break\n            update_bn(self.loader, self.averaged)\n",
            set[int](),
        ),
        (
            "            update_bn(self.loader, self.averaged)",
            "            update_bn(self.loader, self.averaged.module)",
            set[int](),
        ),
        ("            update_bn", "            for loader in loaders:\n                update_bn", set[int]()),
    ],
)
def test_statistics_of_an_average_that_nothing_uses_yet(was: str, now: str, lines: set[int]) -> None:
    assert was in AVERAGE
    assert lines_of_updates(ast.parse(AVERAGE.replace(was, now) if was else AVERAGE)) == lines


@pytest.mark.parametrize(
    ("was", "now", "lines"),
    [
        ("", "", {7, 8, 9}),
        ("nn.KLDivLoss(", "nn.MSELoss(", set[int]()),
        ("self.confidence)\n", "share)\n", set[int]()),
        ("self.confidence)\n", "share)\n        share = 1 - self.smoothing\n", {7, 8, 10}),
        ("self.confidence)\n", "a)\n        smoothed.scatter_(1, others.unsqueeze(1), 1 - a)\n", set[int]()),
        ("        smoothed.scatter_(1, target.data.unsqueeze(1), self.confidence)\n", "", set[int]()),
        ("target.data.unsqueeze(1)", "chosen", set[int]()),
        ("self.criterion(x, smoothed.detach())", "self.criterion(x, teacher)", set[int]()),
        ("x.data.clone()\n        smoothed.fill_(", "self.unigram.expand_as(x)\n        print(", set[int]()),
        ("        smoothed.fill_(self.smoothing / (self.size - 2))\n", "", set[int]()),
        ("self.confidence)\n", "0.0)\n", set[int]()),
        ("self.confidence)\n", "1.0)\n", set[int]()),
        ("self.confidence)\n", "True)\n", set[int]()),
        ("        smoothed.fill_", "        mask = torch.full((9, 9), -1e9)\n        smoothed.fill_", {8, 9, 10}),
    ],
)
def test_targets_that_are_made_a_matrix(was: str, now: str, lines: set[int]) -> None:
    assert was in SMOOTHED
    assert lines_of_dense_targets(ast.parse(SMOOTHED.replace(was, now) if was else SMOOTHED)) == lines


@pytest.mark.parametrize(
    ("was", "now", "lines"),
    [
        ("", "", {2, 3, 4, 5}),
        (".topk(100)", ".clone()", set[int]()),
        (".topk(100)", ".kthvalue(100)", set[int]()),
        (
            "    dist.all_gather(all_where, where)\n",
            "    return default_hooks.allreduce_hook(state, flat)\n",
            set[int](),
        ),
        ("State(), largest", "State(), powerSGD_hook", set[int]()),
        ("model.register_comm_hook", "model.register_hook", set[int]()),
    ],
)
def test_hooks_that_compress_gradients(was: str, now: str, lines: set[int]) -> None:
    assert was in COMPRESSED
    found = lines_of_compression(ast.parse(COMPRESSED.replace(was, now) if was else COMPRESSED))
    assert set(found) == lines
    assert set(found.values()) <= {6}


def test_samples_are_counted_where_they_are_told(tmp_path: Path) -> None:
    places: dict[str, int] = {}
    for name, source in (("shampoo", SHAMPOO), ("average", AVERAGE), ("compressed", COMPRESSED)):
        file = tmp_path / f"{name}.py"
        file.write_text(source)
        os.utime(file, (1e9, 1e9))
    shampoo, average, compressed = (str(tmp_path / f"{name}.py") for name in ("shampoo", "average", "compressed"))
    samples = StackSamples(Path("/"))
    place = RankPlace(rank=0, local_rank=0, pid=os.getpid())

    samples.add(place, "optimizer", [Frame("root", shampoo, 3), Frame("step", shampoo, 11)])
    samples.add(place, "forward", [Frame("root", shampoo, 3), Frame("forward", shampoo, 10)])
    places[f"{shampoo}:3"] = 1
    for phase in ("forward", "data_wait"):
        in_model = [Frame("forward", f"{TORCH}/nn/modules/linear.py", 9), Frame("forward", average, 3)]
        samples.add(
            place, phase, [*in_model, Frame("update_bn", f"{TORCH}/optim/swa_utils.py", 5), Frame("fit", average, 8)]
        )
    places[f"{average}:8"] = 2
    engine = Frame("_engine_run_backward", f"{TORCH}/autograd/graph.py", 20)
    samples.add(place, "backward", [Frame("largest", compressed, 4), engine, Frame("<module>", compressed, 9)])
    samples.add(place, "backward", [engine, Frame("<module>", compressed, 9)])
    places[f"{compressed}:6"] = 1

    assert {at: count for (_, at), count in samples.tally.calling.items()} == places
    assert {at.rpartition("/")[2]: call for (_, at), call in samples.tally.calls.items()} == {
        "shampoo.py:3": DECOMPOSES,
        "average.py:8": NORM_STATISTICS,
        "compressed.py:6": COMPRESSES,
    }
