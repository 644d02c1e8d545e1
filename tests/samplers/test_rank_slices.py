"""What each rank computes for all ranks, to keep only its own part."""

from __future__ import annotations

import ast
import textwrap

import pytest

from gpulaunch.profiler.samplers.rank_slices import lines_for_all_ranks

MODULE = """
dist.init_process_group("gloo")
class Batches:
    def __init__(self, rank, world_size):
        self.rank, self.mine = rank, slice(rank, None, world_size)
        self.first = rank * 32

    def __next__(self):
        rows = torch.randint(len(self.kinds), (64,))
{}
"""
TOLD = "pictures = self.augment(self.pictures[rows])"


def told(body: str) -> list[str]:
    source = MODULE.format(textwrap.indent(body, " " * 8))
    lines = source.splitlines()
    return [lines[line - 1].strip() for line in sorted(lines_for_all_ranks(ast.parse(source)))]


@pytest.mark.parametrize(
    "kept",
    [
        "return pictures[self.mine], self.kinds[rows][self.mine]",
        "pictures = pictures[self.mine]\nreturn pictures.flatten(1), self.kinds[rows[self.mine]]",
        "return pictures[self.first : self.first + 32], self.kinds[rows][self.mine]",
        "return pictures[self.rank :: self.ranks], rows[self.mine]",
        "return pictures[dist.get_rank() * 32 : (dist.get_rank() + 1) * 32, :], rows[self.mine]",
    ],
)
def test_what_is_computed_for_all_ranks_and_sliced_by_the_rank_is_told(kept: str) -> None:
    assert told(f"{TOLD}\n{kept}") == [TOLD]


def test_a_list_whose_elements_are_computed_one_by_one_is_told() -> None:
    line = "graphs = [build(self.molecules[i], self.noise) for i in rows.tolist()]"
    assert told(f"{line}\nyield collate(graphs[self.rank :: self.ranks])") == [line]


@pytest.mark.parametrize(
    "body",
    [
        f"{TOLD}\nreturn pictures[self.mine], rows[self.mine], pictures.mean()",
        f"{TOLD}\nreturn pictures[: self.count], rows[self.mine]",
        f"{TOLD}\nreturn pictures[self.rank], rows[self.mine]",
        f"{TOLD}\nself.pictures = pictures\npictures = pictures[self.mine]\nrows = rows[self.mine]",
        f"{TOLD}\nreturn pictures[self.mine]",
        "inverse = torch.linalg.inv(kernel)\nreturn inverse[self.mine], rows[self.mine]",
        "tokens = tokenizer.encode(text)\nreturn tokens[self.mine]",
        "order = torch.randperm(99, generator=self.g)\nreturn order[self.mine]",
        "order = sorted(rows, key=len)\nreturn order[self.mine]",
        "parts = all_gather(rows)\nreturn parts[self.mine]",
        "parts = rows.view(-1)\nreturn parts[self.mine]",
        "drawn = self.draw(99)\nreturn drawn[self.mine]",
        "values = torch.linalg.svdvals(self.weight)\nreturn values[: self.rank]",
        "graphs = [build(i) for i in rows if i in self.known]\nreturn graphs[self.mine]",
        "parts = [gather(i) for i in rows]\nreturn parts[self.mine]",
        "graphs = [build(i) for i in rows]\nreturn graphs[self.mine], len(graphs)",
    ],
    ids=[
        *("all of it is used", "a slice of its own", "one part of several", "it is kept"),
        *("of no samples of its own", "of a matrix", "tokens of one text"),
        *("drawn alike by all ranks", "sorted", "gathered", "only a view", "drawn by a function", "the first ones"),
        *("chosen ones", "gathered one by one", "their number is used"),
    ],
)
def test_what_needs_all_or_is_used_besides_is_not_told(body: str) -> None:
    assert told(body) == []


def test_the_rank_of_a_matrix_is_another_one() -> None:
    kept = f"{TOLD}\nreturn pictures[self.mine]"
    source = MODULE.replace("dist.init_process_group", "start").format(textwrap.indent(kept, " " * 8))
    assert lines_for_all_ranks(ast.parse(source)) == set()
