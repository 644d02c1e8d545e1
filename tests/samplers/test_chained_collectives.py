"""Which collectives of a loop need each other's results."""

from __future__ import annotations

import ast
import textwrap

import pytest

from gpulaunch.profiler.samplers.chained_collectives import lines_of_chained

SWAV = """
for it in range(rounds):
    rows = torch.sum(q, dim=1, keepdim=True)
    if world > 1:
        dist.all_reduce(rows)
    q /= rows
    q /= torch.sum(q, dim=0, keepdim=True)
"""
POWER = """
while (v - last).norm() > 1e-3:
    last = v
    moved = part @ v
    torch.distributed.all_reduce(moved, op=SUM)
    v = moved / moved.norm()
"""
GRADIENTS = """
for _ in range(5):
    along = a @ p
    dist.all_reduce(along)
    alpha = rr / (p @ along)
    r = r - alpha * along
    rr, old = r @ r, rr
    p = r + rr / old * p
"""


IN_TRAINING = f"for batch in loader:\n{textwrap.indent(SWAV, '    ')}\n    loss(q).backward()"
OF_TRAINING = IN_TRAINING.replace("for it in range(rounds)", "if balanced")


def told(source: str) -> set[str]:
    lines = source.splitlines()
    found = lines_of_chained(ast.parse(source), lambda loop: "backward" in ast.unparse(loop))
    return {lines[line - 1].strip() for line in found}


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        (SWAV, "dist.all_reduce(rows)"),
        (SWAV.replace("q /= rows", "q.div_(rows)"), "dist.all_reduce(rows)"),
        (POWER, "torch.distributed.all_reduce(moved, op=SUM)"),
        (GRADIENTS, "dist.all_reduce(along)"),
        (IN_TRAINING, "dist.all_reduce(rows)"),
    ],
    ids=["Sinkhorn", "in place by a method", "a power iteration", "conjugate gradients", "inside the training loop"],
)
def test_each_turn_begins_with_what_the_last_one_has_reduced(loop: str, line: str) -> None:
    assert told(loop) == {line}


@pytest.mark.parametrize(
    "loop",
    [
        "for name, value in metrics.items():\n    dist.all_reduce(value)\n    metrics[name] = value / world",
        "for name in m:\n    v = torch.tensor(m[name])\n    dist.all_reduce(v)\n    m[name] = v.item()",
        "for p in model.parameters():\n    dist.all_reduce(p.grad)\n    p.grad /= world",
        "for x in parts:\n    s = x.sum()\n    dist.all_reduce(s)\n    total = total + s",
        "for x in parts:\n    s = x.sum()\n    dist.all_reduce(s)\n    s /= world",
        "for x in parts:\n    s = self.f(x)\n    dist.all_reduce(s)\n    self.total = self.total + s",
        OF_TRAINING,
        "rows = q.sum(1)\ndist.all_reduce(rows)\nq /= rows",
    ],
    ids=[
        "each of its own",
        "parts of an object",
        "gradients",
        "a sum of all",
        "a mean",
        "of an attribute",
        "what a step leaves to the next one",
        "no loop",
    ],
)
def test_what_could_be_reduced_at_once(loop: str) -> None:
    assert told(loop) == set()
