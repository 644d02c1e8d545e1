"""The rows of scores that a model computes and that its loss is given, in graphs of torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpulaunch.profiler.probe.graph import graph_below
from gpulaunch.profiler.probe.graph_nodes import nodes_above
from gpulaunch.profiler.probe.scores import scores_of

pytestmark = pytest.mark.torch

WORDS, WIDTH = 50, 8
HEAD = nn.Linear(WIDTH, WORDS)
HIDDEN = torch.rand(2, 6, WIDTH, requires_grad=True)
TARGETS = torch.randint(WORDS, (2, 6))
ASKED = torch.tensor([[True, False, False] * 2] * 2)


def found(loss: torch.Tensor) -> tuple[int, int, int] | None:
    """The rows, those of the loss, and the products."""
    graph = graph_below(torch, (loss,))
    if (of := scores_of(graph, nodes_above(graph))) is None:
        return None
    assert of.weights <= graph.keys()
    return of.rows, of.loss_rows, of.products


def scores(rows: int, loss_rows: int) -> tuple[int, int, int]:
    return rows, loss_rows, rows * WORDS * WIDTH


def test_a_loss_that_is_given_all_rows() -> None:
    flat = HEAD(HIDDEN).view(-1, WORDS)

    assert found(F.cross_entropy(flat, TARGETS.view(-1), ignore_index=-100)) == scores(12, 12)
    assert found(F.cross_entropy(flat / 0.5, TARGETS.view(-1), label_smoothing=0.1)) == scores(12, 12)
    assert found(F.nll_loss(flat.log_softmax(1), TARGETS.view(-1)) + HIDDEN.square().mean()) == scores(12, 12)


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


def test_the_parts_of_several_losses_count_together() -> None:
    all_scores = HEAD(HIDDEN)
    each = [F.cross_entropy(all_scores[:, at], TARGETS[:, at]) for at in range(6)]

    assert found(torch.stack(each).sum()) == scores(12, 12)
    assert found(torch.stack(each[:2]).sum()) == scores(12, 4)


def test_scores_of_all_places_of_a_sequence() -> None:
    assert found(F.cross_entropy(HEAD(HIDDEN).transpose(1, 2), TARGETS)) == scores(12, 12)


def test_the_weights_of_the_head_are_known_also_if_they_are_tied() -> None:
    for weight in (HEAD.weight, HEAD.weight.float().t().t()):
        graph = graph_below(torch, (F.cross_entropy(F.linear(HIDDEN[0], weight), TARGETS[0]),))
        of = scores_of(graph, nodes_above(graph))
        assert of is not None
        assert {id(node.variable) for node in of.weights} == {id(HEAD.weight)}


@pytest.mark.parametrize(
    ("loss", "ignores"),
    [
        (F.cross_entropy(HEAD(HIDDEN[0]), TARGETS[0]), True),
        (F.cross_entropy(HEAD(HIDDEN[0]), TARGETS[0], ignore_index=-100, label_smoothing=0.1), True),
        (F.cross_entropy(HEAD(HIDDEN[0]), TARGETS[0], ignore_index=-1), False),
        (F.cross_entropy(HEAD(HIDDEN[0]), TARGETS[0], reduction="none").mean(), False),
    ],
)
def test_whether_a_loss_ignores_targets(loss: torch.Tensor, *, ignores: bool) -> None:
    graph = graph_below(torch, (loss,))
    of = scores_of(graph, nodes_above(graph))
    assert of is not None
    assert of.ignores is ignores


ALL = HEAD(HIDDEN)
SMALL = nn.Linear(WIDTH, 3)
SOFT = torch.rand(2, 6, WORDS)


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss(HEAD(HIDDEN), torch.rand(2, 6, WORDS)),
        F.cross_entropy(torch.cat([HEAD(HIDDEN[0]), HEAD(HIDDEN[1])]), TARGETS.view(-1)),
        F.cross_entropy(HEAD(HIDDEN).sum(1), TARGETS[:, 0]),
        F.cross_entropy(ALL[ASKED], TARGETS[ASKED]) + F.kl_div(ALL.log_softmax(-1), SOFT, reduction="sum"),
        F.cross_entropy(ALL[ASKED], TARGETS[ASKED]) + ALL.logsumexp(-1).square().mean(),
        F.cross_entropy(ALL[ASKED], TARGETS[ASKED]) + F.cross_entropy(SMALL(HIDDEN[:, 0]), TARGETS[:, 0] % 3),
        F.cross_entropy(HEAD(HIDDEN[0, 0]), TARGETS[0, 0]),
    ],
    ids=[
        *("another loss", "two heads", "one row of several", "distilled, too", "regularized, too", "another head"),
        "of one sample",
    ],
)
def test_what_is_no_such_loss_or_uses_more_is_not_told(loss: torch.Tensor) -> None:
    assert found(loss) is None
