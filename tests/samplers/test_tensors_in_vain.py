"""Merged adapters, statistics and copies of a store, matrices of graphs, pairs of all ranks: tensors for nothing."""

from __future__ import annotations

import ast

import pytest

from gpulaunch.profiler.samplers.dense_graphs import lines_of_products
from gpulaunch.profiler.samplers.gathered_pairs import lines_of_gathered_pairs
from gpulaunch.profiler.samplers.merged_adapters import lines_of_merges
from gpulaunch.profiler.samplers.rolled_stores import lines_of_copies
from gpulaunch.profiler.samplers.store_statistics import lines_of_statistics

ADAPTER = """
class Adapted(nn.Module):
    def __init__(self, layer):
        self.weight, self.bias = layer.requires_grad_(False).weight, layer.bias
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
GRAPHS = """
def one_graph(molecules):
    total = sum(map(len, molecules))
    neighbours = torch.zeros(total, total)
    neighbours[starts, ends] = 1
    return neighbours
def forward(h, neighbours):
    return torch.relu(neighbours @ h)
loader = DataLoader(data, collate_fn=one_graph)
"""
PAIRS = """
class Gathered(torch.autograd.Function):
    def forward(ctx, x):
        return torch.cat(dist.all_gather(x))
    def backward(ctx, gradient):
        dist.all_reduce(gradient)
        return gradient[ctx.mine]
def loss(images, texts, scale):
    all_images, all_texts = Gathered.apply(images), Gathered.apply(texts)
    logits = scale * all_images @ all_texts.T
    turned = logits.T
    right = torch.arange(len(logits))
    return F.cross_entropy(logits, right) + F.cross_entropy(turned, right)
"""


@pytest.mark.parametrize(
    ("was", "now", "lines"),
    [
        ("", "", [6]),
        ("self.scale * (self.up @ self.down)", "self.up @ self.down", [6]),
        ("layer.requires_grad_(False).weight", "layer.weight", []),
        ("    def forward", "    @torch.no_grad()\n    def forward", []),
        ("return F.linear(x, weight, self.bias)", "for _ in x: h = F.linear(h, weight)", []),
        ("return F", "self.norm = weight.norm(dim=1)\n        return F", []),
        ("self.up @ self.down", "self.up * self.down", []),
        ("self.up @ self.down", "x @ self.down", []),
        ("F.linear(x, weight, self.bias)", "F.conv2d(x, weight, self.bias)", []),
    ],
    ids=[
        "scaled",
        "as it is",
        "not frozen",
        "in inference",
        "for several layers",
        "its norm is used",
        "no product of matrices",
        "of what is read",
        "no linear layer",
    ],
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
        ("known = self", "self.count = 0\n        known = self", []),
        ("known = self", "self.seen.mul_(0.9)\n        known = self", []),
        ("known = self", "self.seen = encoder(data)\n        known = self", []),
        ("self.seen[: self.count]", "self.seen[draw(32)]", []),
        ("known.mean(0), known.std(0)", "known.mean(1), known.std(1)", []),
    ],
    ids=[
        "as it is",
        "all rows",
        "filled at once",
        "never filled",
        "begins again",
        "changed",
        "replaced",
        "of a few rows",
        "of each row",
    ],
)
def test_statistics_of_a_store(was: str, now: str, lines: list[int]) -> None:
    assert was in STORE
    assert sorted(lines_of_statistics(ast.parse(STORE.replace(was, now, 1) if was else STORE))) == lines


@pytest.mark.parametrize(
    ("was", "now", "lines"),
    [
        ("", "", [8]),
        ("torch.zeros(total, total)\n    neighbours[starts, ends] = 1", "torch.block_diag(*molecules)", [7]),
        ("neighbours @ h", "torch.mm(neighbours, h)", [8]),
        ("neighbours @ h", "h @ neighbours", []),
        ("collate_fn=one_graph", "batch_size=2", []),
        ("torch.zeros(total, total)", "torch.zeros(total, 8)", []),
        ("torch.zeros(total, total)", "torch.rand(total, total)", []),
        ("neighbours[starts, ends] = 1", "neighbours[:, 0] = 1", []),
        ("neighbours[starts, ends] = 1", "neighbours[starts, ends] = weights(starts, ends)", []),
        ("    neighbours = torch.z", "    for each in molecules: neighbours = torch.z", []),
    ],
    ids=[
        *("as it is", "of blocks", "by a function", "from the other side", "not of a batch", "not square"),
        *("not zero", "columns", "a weight for each pair", "one for each molecule"),
    ],
)
def test_products_with_the_matrix_of_a_batch_of_graphs(was: str, now: str, lines: list[int]) -> None:
    assert was in GRAPHS
    assert sorted(lines_of_products(ast.parse(GRAPHS.replace(was, now, 1) if was else GRAPHS))) == lines


@pytest.mark.parametrize(
    ("was", "now", "lines"),
    [
        ("", "", {10: 10, 13: 10}),
        ("torch.autograd.Function", "Gatherer", {}),
        ("dist.all_gather(x)", "x", {}),
        ("dist.all_reduce(gradient)", "pass", {}),
        ("scale * all_images @ all_texts.T", "all_images.T @ all_texts", {}),
        ("scale * all_images @", "scale * images @", {}),
        ("Gathered.apply(texts)", "texts", {}),
        ("return F.cross_entropy(logits, right) + F.cross_entropy(turned, right)", "return logits.mean()", {10: 10}),
    ],
    ids=[
        "as it is",
        "no gradients",
        "gathers nothing",
        "own gradients",
        "of features",
        "its own rows",
        "one is its own",
        "no loss of rows",
    ],
)
def test_the_loss_of_the_pairs_of_all_ranks(was: str, now: str, lines: dict[int, int]) -> None:
    assert was in PAIRS
    assert lines_of_gathered_pairs(ast.parse(PAIRS.replace(was, now, 1) if was else PAIRS)) == lines


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("self.seen = torch.cat([self.seen, seen])[-SIZE:]", [1]),
        ("setattr(self, name, torch.cat([getattr(self, name), rows])[-SIZE:])", [1]),
        ("queue = np.concatenate((queue, rows))[-SIZE:]", [1]),
        ("self.seen = torch.cat([self.seen, seen])", []),
        ("self.seen = torch.cat([old, seen])[-SIZE:]", []),
        ("tokens = torch.cat([tokens, new], 1)[:, -SIZE:]", []),
        ("self.seen = self.seen[-SIZE:]", []),
    ],
)
def test_stores_that_are_copied_to_add_a_few_rows(body: str, lines: list[int]) -> None:
    assert sorted(lines_of_copies(ast.parse(body))) == lines
