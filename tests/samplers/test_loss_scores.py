"""The line on which a program computes the scores of a cross-entropy, and stacks as torch 2.13 has them."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from gpulaunch.profiler.daemon.stack_samples import StackSamples
from gpulaunch.profiler.record import RankPlace
from gpulaunch.profiler.samplers.loss_scores import lines_of_scores
from gpulaunch.profiler.stack import Frame

PACKAGES = "/opt/conda/lib/python3.12/site-packages"
PROGRAM = """
def step(self, ids, targets):
    hidden = self.encoder(ids)
    scores = self.head(hidden)
    scores = scores.view(-1, WORDS)
    loss = F.cross_entropy(scores.float(), targets.view(-1))
    other = criterion(self.head(hidden), targets)
    loss.backward()
"""
LOSS = Frame("cross_entropy", f"{PACKAGES}/torch/nn/functional.py", 3500)
MODULE = [
    Frame("CrossEntropyLoss.forward", f"{PACKAGES}/torch/nn/modules/loss.py", 1300),
    Frame("Module._call_impl", f"{PACKAGES}/torch/nn/modules/module.py", 1800),
]
LIBRARY = [Frame("ForMaskedLMLoss", f"{PACKAGES}/transformers/loss/loss_utils.py", 80)]


def test_the_scores_of_a_loss_are_computed_above_it() -> None:
    lines, of_cross_entropy = lines_of_scores(ast.parse(PROGRAM))

    assert of_cross_entropy == {4}
    assert lines[6] == 4
    assert 7 not in lines
    assert 8 not in lines


def scored(samples: StackSamples) -> dict[tuple[int, str], int]:
    """The samples in lines that give scores."""
    return {line: count for line, count in samples.tally.around_model.items() if line in samples.tally.losses}


@pytest.mark.parametrize(
    ("frames", "line"),
    [([LOSS], 4), ([LOSS, *MODULE], 4), ([LOSS, *LIBRARY], None), ([LOSS, *MODULE, *LIBRARY], None), (MODULE, None)],
    ids=["a function", "a module", "a library's", "a library's module", "another loss"],
)
def test_the_loss_of_the_program_is_sampled(tmp_path: Path, frames: list[Frame], line: int | None) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    samples.add(place, "forward", [Frame("step", str(program), 4), Frame("<module>", str(program), 30)])
    samples.add(place, "forward", [*frames, Frame("step", str(program), 6), Frame("<module>", str(program), 30)])

    assert samples.tally.losses == {(0, f"{program}:4"): 0 if line is None else 1}
    assert scored(samples) == {(0, f"{program}:4"): 1}


def test_a_line_that_gives_no_scores_is_not_counted(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    samples, place = StackSamples(Path("/")), RankPlace(rank=0, local_rank=0, pid=os.getpid())
    for line in (3, 7):
        samples.add(place, "forward", [Frame("step", str(program), line), Frame("<module>", str(program), 30)])

    assert samples.tally.losses == scored(samples) == {}
