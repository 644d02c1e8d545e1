"""The rows of scores that a model computes and that its loss is given, in graphs of torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpulaunch.profiler.probe.graph import graph_below
from gpulaunch.profiler.probe.scores import Scores, scores_of

pytestmark = pytest.mark.torch

WORDS, WIDTH = 50, 8
HEAD = nn.Linear(WIDTH, WORDS)
HIDDEN = torch.rand(2, 6, WIDTH, requires_grad=True)
TARGETS = torch.randint(WORDS, (2, 6))
ASKED = torch.tensor([[True, False, False] * 2] * 2)


def found(loss: torch.Tensor) -> Scores | None:
    return scores_of(graph_below(torch, (loss,)))


def scores(rows: int, loss_rows: int) -> Scores:
    return Scores(rows, loss_rows, WORDS, rows * WORDS * WIDTH)


def test_a_loss_that_is_given_all_rows() -> None:
    flat = HEAD(HIDDEN).view(-1, WORDS)

    assert found(F.cross_entropy(flat, TARGETS.view(-1), ignore_index=-100)) == scores(12, 12)
    assert found(F.cross_entropy(flat / 0.5, TARGETS.view(-1), label_smoothing=0.1)) == scores(12, 12)
    assert found(F.nll_loss(flat.log_softmax(1), TARGETS.view(-1)) + flat.pow(2).mean()) == scores(12, 12)


def test_rows_that_are_left_out_after_the_head() -> None:
    assert found(F.cross_entropy(HEAD(HIDDEN)[ASKED], TARGETS[ASKED])) == scores(12, 4)
    causal = HEAD(HIDDEN)[:, :-1].reshape(-1, WORDS)
    assert found(F.cross_entropy(causal, TARGETS[:, 1:].reshape(-1))) == scores(12, 10)


def test_rows_that_are_chosen_before_it() -> None:
    assert found(F.cross_entropy(HEAD(HIDDEN[ASKED]), TARGETS[ASKED])) == scores(4, 4)


def test_tied_weights_in_reduced_precision() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(F.linear(HIDDEN, HEAD.weight).view(-1, WORDS), TARGETS.view(-1))
    assert found(loss) == scores(12, 12)


def test_of_several_heads_the_largest_counts() -> None:
    small = nn.Linear(WIDTH, 3)
    loss = F.cross_entropy(small(HIDDEN[:, 0]), TARGETS[:, 0] % 3)
    assert found(loss) == Scores(2, 2, 3, 2 * 3 * WIDTH)
    assert found(loss + F.cross_entropy(HEAD(HIDDEN).view(-1, WORDS), TARGETS.view(-1))) == scores(12, 12)


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss(HEAD(HIDDEN), torch.rand(2, 6, WORDS)),
        F.cross_entropy(HEAD(HIDDEN).transpose(1, 2), TARGETS),
        F.cross_entropy(torch.cat([HEAD(HIDDEN[0]), HEAD(HIDDEN[1])]), TARGETS.view(-1)),
        F.cross_entropy(HEAD(HIDDEN).sum(1), TARGETS[:, 0]),
    ],
    ids=["another loss", "scores of a picture", "two heads", "one row of several"],
)
def test_what_is_no_such_loss_is_not_told(loss: torch.Tensor) -> None:
    told = found(loss)
    assert told is None or told.rows == told.loss_rows
