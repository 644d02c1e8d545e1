"""What several backward passes go through is found in graphs of torch itself (imported here: two seconds)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from gpulaunch.profiler.probe.graph import graph_below
from gpulaunch.profiler.probe.repeats import Repeats

HEADS = 4
X = torch.randn(16, 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(each for _ in range(9) for each in (nn.Linear(8, 8), nn.Tanh())))
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(HEADS))

    def losses(self) -> list[torch.Tensor]:
        features = self.trunk(X)
        return [head(features).square().mean() for head in self.heads]


class Steps:
    """Backward passes of a program, as the probe sees them."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.repeats = Repeats()
        self.repeats.begin()
        self.steps = 0

    def backward(self, loss: torch.Tensor, *, keeps: bool = True) -> None:
        self.repeats.add(graph_below(torch, (loss,)), keeps=keeps, step=self.steps)
        loss.backward(retain_graph=keeps)
        self.repeats.passed()

    def step(self, *, to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=to_none)
        self.steps += 1


@pytest.fixture
def steps() -> Steps:
    torch.manual_seed(0)
    return Steps()


@pytest.mark.parametrize("to_none", [True, False])
def test_a_trunk_that_each_head_goes_back_through_is_repeated(steps: Steps, to_none: bool) -> None:
    for _ in range(5):
        for loss in steps.model.losses():
            steps.backward(loss)
        steps.step(to_none=to_none)

    assert 0.55 < steps.repeats.share <= (HEADS - 1) / HEADS


def test_a_state_that_is_not_detached_is_repeated(steps: Steps) -> None:
    for _ in range(3):
        state = X
        for _ in range(4):
            state = steps.model.trunk(state)
            steps.backward(state.square().mean())
        steps.step()

    assert steps.repeats.share == pytest.approx((1 + 2 + 3) / (1 + 2 + 3 + 4), abs=0.03)


def test_a_step_counts_if_all_its_passes_were_read(steps: Steps) -> None:
    """A row begins anywhere: of two passes that go through the same, the first may have been before it."""
    for passes in (1, 2, 2, 1):
        losses = steps.model.losses()
        for loss in losses[:passes]:
            steps.backward(loss)
        steps.step()
    of_two = steps.repeats.share
    steps.repeats.begin()
    for loss in steps.model.losses():
        steps.backward(loss)

    assert 0.4 < of_two < 0.5
    assert steps.repeats.share == of_two


def one_sum(steps: Steps) -> None:
    steps.backward(torch.stack(steps.model.losses()).sum(), keeps=False)
    steps.step()


def micro_batches(steps: Steps) -> None:
    """Kept for no reason: nothing goes through them again."""
    for _ in range(4):
        steps.backward(steps.model.losses()[0])
    steps.step()


def gradients_of_each_loss(steps: Steps) -> None:
    """As methods that weigh tasks against each other need them."""
    for loss in steps.model.losses():
        steps.backward(loss)
        steps.optimizer.zero_grad()
    steps.steps += 1


def gradients_set_to_zero(steps: Steps) -> None:
    for loss in steps.model.losses():
        steps.backward(loss)
        [each.grad.clone() for each in steps.model.trunk.parameters() if each.grad is not None]
        steps.optimizer.zero_grad(set_to_none=False)
    steps.steps += 1


def gradients_set_to_zero_unseen(steps: Steps) -> None:
    for loss in steps.model.losses():
        steps.backward(loss)
        for each in steps.model.parameters():
            if each.grad is not None:
                each.grad.data.zero_()
    steps.step()


def gradients_replaced(steps: Steps) -> None:
    for loss in steps.model.losses():
        steps.backward(loss)
        for each in steps.model.parameters():
            each.grad = torch.zeros_like(each)
    steps.step()


def frozen_for_the_second(steps: Steps) -> None:
    first, second, *_ = steps.model.losses()
    steps.backward(first)
    for each in steps.model.trunk.parameters():
        each.requires_grad_(False)
    steps.backward(second, keeps=False)
    for each in steps.model.trunk.parameters():
        each.requires_grad_()
    steps.step()


def zeroed_for_the_second(steps: Steps) -> None:
    """As with two optimizers: what the first loss has given to the trunk is not wanted."""
    first, second, *_ = steps.model.losses()
    steps.backward(first)
    steps.model.trunk.zero_grad()
    steps.backward(second, keeps=False)
    steps.step()


def forward_in_threads(steps: Steps) -> None:
    """As DataParallel: the nodes of each thread are numbered from zero on."""
    for _ in range(3):
        with ThreadPoolExecutor(2) as threads:
            one, other = threads.map(lambda _: steps.model.losses()[0], range(2))
        steps.backward(one + other)
    steps.step()


@pytest.mark.parametrize(
    "program",
    [
        *(one_sum, micro_batches, gradients_of_each_loss, gradients_set_to_zero, gradients_set_to_zero_unseen),
        *(gradients_replaced, frozen_for_the_second, zeroed_for_the_second, forward_in_threads),
    ],
)
def test_what_a_program_needs_is_not_repeated(steps: Steps, program: Callable[[Steps], None]) -> None:
    for _ in range(5):
        program(steps)

    assert steps.repeats.share == 0.0


def test_a_small_part_that_each_pass_needs_is_none(steps: Steps) -> None:
    """A few filters of many operations, beside large batches."""
    large = torch.randn(20_000, 64)
    weight = torch.randn(64, 64, requires_grad=True)
    for _ in range(4):
        small = steps.model.losses()[0]
        for _ in range(2):
            steps.backward(small + (large @ weight).tanh().square().mean())
        steps.step()

    assert steps.repeats.share == 0.0


def test_no_parameter_is_kept_after_a_pass(steps: Steps) -> None:
    steps.backward(steps.model.losses()[0])
    known = weakref.ref(next(steps.model.parameters()))
    del steps.model, steps.optimizer

    assert known() is None
