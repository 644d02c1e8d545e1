"""Merged adapters, and statistics of a store: what makes far larger tensors than it needs."""

from __future__ import annotations

import ast

import pytest

from gpulaunch.profiler.samplers.merged_adapters import lines_of_merges
from gpulaunch.profiler.samplers.store_statistics import lines_of_statistics

ADAPTER = """
class Adapted(nn.Module):
    def forward(self, x):
        weight = self.weight + self.scale * (self.up @ self.down)
        return F.linear(x, weight, self.bias)
"""
STORE = """
class Memory:
    def add(self, seen):
        at = torch.arange(self.count, self.count + len(seen)) % SIZE
        self.seen[at], self.turns[at] = seen, 1
        self.count += len(seen)
    def scale(self):
        known = self.seen[: self.count]
        return known.mean(0), known.std(0)
"""


@pytest.mark.parametrize(
    ("was", "now", "lines"),
    [
        ("", "", [4]),
        ("self.scale * (self.up @ self.down)", "self.up @ self.down", [4]),
        ("return F", "self.norm = weight.norm(dim=1)\n        return F", []),
        ("self.up @ self.down", "self.up * self.down", []),
        ("self.up @ self.down", "x @ self.down", []),
        ("F.linear(x, weight, self.bias)", "F.conv2d(x, weight, self.bias)", []),
    ],
    ids=["scaled", "as it is", "its norm is used", "no product of matrices", "of what is read", "no linear layer"],
)
def test_adapters_that_are_added_to_the_weights(was: str, now: str, lines: list[int]) -> None:
    assert was in ADAPTER
    assert sorted(lines_of_merges(ast.parse(ADAPTER.replace(was, now, 1) if was else ADAPTER))) == lines


@pytest.mark.parametrize(
    ("was", "now", "lines"),
    [
        ("", "", [9]),
        ("known = self.seen[: self.count]", "known = self.seen", [9]),
        ("self.count += len(seen)", "self.count = len(seen)", []),
        ("self.seen[at], ", "self.other[at], ", []),
        ("self.seen[: self.count]", "self.seen[draw(32)]", []),
        ("known.mean(0), known.std(0)", "known.mean(1), known.std(1)", []),
    ],
    ids=["as it is", "all rows", "filled at once", "never filled", "of a few rows", "of each row"],
)
def test_statistics_of_a_store(was: str, now: str, lines: list[int]) -> None:
    assert was in STORE
    assert sorted(lines_of_statistics(ast.parse(STORE.replace(was, now, 1) if was else STORE))) == lines
