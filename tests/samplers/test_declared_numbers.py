"""What a module computes in every call from the numbers of its configuration: found in the source alone."""

from __future__ import annotations

import ast

import pytest

from gpulaunch.profiler.samplers.constants import constants_of

SOURCE = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Config:
    heads: int = 4
    window: int = 64
    slope = 2
    table: torch.Tensor = None
    rate: float = 0.5
    epoch: int = 0

def bias(length, heads, window, slope):
    slopes = torch.tensor([2.0 ** (-slope * (head + 1) / heads) for head in range(heads)])
    found = torch.zeros(heads, length, length)
    for row in range(length):
        if row < 1 or window == 0:
            continue
        low = row - window if row > window else 0
        found[:, row, low:row] = slopes[:, None]
    return found

class Attention(nn.Module):
    def __init__(self, config, window: int, steep: int, other=2):
        super().__init__()
        self.config = config
        self.window, self.steep = window, steep
        self.other, self.fixed = other, 2
        self.wider = 2 * config.window + self_made
        self.twice = 2 * config.window

    def forward(self, x):
        return x + LINE

def main():
    pass
"""
OF_CONFIG = "bias(len(x), self.config.heads, self.config.window, self.config.slope)"
OF_SELF = "bias(len(x), self.config.heads, self.window, self.steep)"


def is_found(line: str, was: str = "", now: str = "") -> bool:
    assert was in SOURCE
    tree = ast.parse(SOURCE.replace(was, now).replace("LINE", line))
    return bool(constants_of(tree))


@pytest.mark.parametrize("line", [OF_CONFIG, OF_SELF, OF_SELF.replace("steep", "twice")])
def test_what_is_computed_of_declared_numbers_stays(line: str) -> None:
    assert is_found(line)


@pytest.mark.parametrize(
    "line",
    [
        OF_CONFIG.replace("slope", "table"),
        OF_CONFIG.replace("slope", "rate"),
        OF_CONFIG.replace("slope", "epoch"),
        OF_CONFIG.replace("slope", "other"),
        OF_CONFIG.replace("self.config.slope", "x.slope"),
        OF_CONFIG.replace("self.config.slope", "self.model.slope"),
        OF_SELF.replace("steep", "wider"),
        OF_SELF.replace("steep", "other"),
        OF_SELF.replace("steep", "fixed"),
        OF_SELF.replace("len(x)", "x"),
        "torch.tensor([head * x for head in range(4)])",
        "torch.tensor([head for head in range(4)]) * head",
    ],
)
def test_what_no_class_declares_may_vary(line: str) -> None:
    """Whatever is one number in `__init__` may be set from another file, such as a share of the training."""
    assert not is_found(line)


LEARNED = (
    "\n\nclass Learned(Attention):\n    def __init__(self, window: int):\n        self.window = nn.Parameter(window)"
)
GROWS = "\n\nclass Grows(Config):\n    def grow(self):\n        self.window += 1"
MAIN = "def main():\n    pass\n"


@pytest.mark.parametrize(
    ("line", "was", "now"),
    [
        (OF_CONFIG, MAIN, MAIN + "    model.config.window = 3\n"),
        (OF_CONFIG, MAIN, MAIN + "    model.config = narrower(model.config)\n"),
        (OF_CONFIG, MAIN, MAIN + "    setattr(model.config, name, 3)\n"),
        (OF_CONFIG, MAIN, MAIN + "    object.__setattr__(model.config, 'heads', 3)\n"),
        (OF_CONFIG, MAIN, MAIN + LEARNED),
        (OF_CONFIG, MAIN, MAIN + GROWS),
        (
            OF_CONFIG,
            MAIN,
            MAIN + "\nclass Kernel:\n    @property\n    def window(self):\n        return self.raw.exp()",
        ),
        (OF_CONFIG, "super().__init__()", "super().__init__()\n        self.register_parameter('window', raw)"),
        (OF_CONFIG, "slope = 2\n", "slope = 2\n    def __post_init__(self):\n        self.slope = draw()\n"),
        (OF_CONFIG, "window: int = 64", "window: torch.Tensor = None"),
        (OF_CONFIG, "window: int = 64", "window: int = 64\n\nclass Of:\n    window: torch.Tensor"),
        (OF_SELF, MAIN, MAIN + "    model.window = 3\n"),
        (OF_SELF, MAIN, MAIN + LEARNED),
        (OF_SELF, "window: int,", "window,"),
        (OF_SELF, "steep: int", "steep: float"),
        (OF_SELF, "super().__init__()", "steep = torch.rand(1)"),
        (OF_SELF, "self.twice =", "self.steep ="),
        (OF_SELF, "Attention(nn.Module)", "Attention"),
        (OF_SELF.replace("steep", "twice"), "config.window\n\n", "encoder.window\n\n"),
    ],
)
def test_what_something_else_may_set_varies(line: str, was: str, now: str) -> None:
    assert is_found(line)
    assert not is_found(line, was, now)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("if row < 1", "if found.sum() < x"),
        ("continue", "seen.append(row)"),
        ("row > window", "row > random()"),
        ("range(heads)]", "drawn(heads)]"),
        ("for head in range(heads)]", "for head in range(heads) if random()]"),
    ],
)
def test_a_function_that_does_more_does_not_give_the_same(was: str, now: str) -> None:
    assert not is_found(OF_CONFIG, was, now)
