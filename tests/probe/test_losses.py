"""The losses of a trial, kept where backward begins."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from gpulaunch.profiler.probe import facts
from gpulaunch.profiler.probe.losses import BLOCK, MOST_BLOCKS, Losses

CAPTURES = [False]
TORCH: Any = SimpleNamespace(
    cuda=SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: CAPTURES[0]),
    compiler=SimpleNamespace(is_dynamo_compiling=lambda: False),
    _C=SimpleNamespace(DisableTorchFunction=nullcontext),
)


class Scalar:
    def __init__(self, value: float, elements: int = 1) -> None:
        self.value = value
        self.elements = elements

    def numel(self) -> int:
        return self.elements

    def detach(self) -> Scalar:
        return self

    def __float__(self) -> float:
        return float(self.value)


class Probe:
    def __init__(self) -> None:
        self.trains = True
        self.failed: list[str] = []

    def trains_here(self) -> bool:
        return self.trains

    def unavailable(self, _hook: object, why: str) -> None:
        self.failed.append(why)


@pytest.fixture
def probe() -> Probe:
    facts.rank_facts.known.pop("losses", None)
    return Probe()


@pytest.fixture
def losses(probe: Probe) -> Losses:
    return Losses(probe, TORCH)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


@pytest.fixture
def backward(losses: Losses) -> Callable[..., Any]:
    return losses.tap(lambda outputs, **_: outputs)


def told(losses: Losses) -> Any:
    losses.look()
    return facts.rank_facts.known.get("losses")


def test_the_mean_of_each_block_is_told(losses: Losses, backward: Callable[..., Any]) -> None:
    for value in range(2 * BLOCK + 1):
        assert backward((Scalar(value),), accumulate_grad=True)

    assert told(losses) == [(BLOCK - 1) / 2, (BLOCK - 1) / 2 + BLOCK]
    for value in range(BLOCK - 1):
        backward((Scalar(value),), accumulate_grad=True)
    assert len(told(losses)) == 3


def test_only_scalars_that_training_backpropagates_from_are_losses(
    losses: Losses, probe: Probe, backward: Callable[..., Any]
) -> None:
    for _ in range(BLOCK):
        backward((Scalar(1.0),))  # autograd.grad
        backward((Scalar(1.0, 3),), accumulate_grad=True)
        backward((Scalar(1.0), Scalar(2.0)), accumulate_grad=True)
    probe.trains = False
    for _ in range(BLOCK):
        backward((Scalar(1.0),), accumulate_grad=True)

    assert told(losses) is None
    assert probe.failed == []


def test_a_loss_that_is_not_finite_is_null_and_their_number_is_bounded(
    losses: Losses, backward: Callable[..., Any]
) -> None:
    for value in (*[float("nan")] * BLOCK, *[1.0] * BLOCK * MOST_BLOCKS):
        backward((Scalar(value),), accumulate_grad=True)

    assert told(losses) == [None, *[1.0] * (MOST_BLOCKS - 1)]
    backward((Scalar(2.0),), accumulate_grad=True)
    assert len(told(losses)) == MOST_BLOCKS


def test_what_cannot_be_kept_does_not_fail_the_program(probe: Probe, backward: Callable[..., Any]) -> None:
    assert backward((object(),), accumulate_grad=True)

    assert len(probe.failed) == 1


def test_nothing_waits_for_a_gpu_whose_work_is_captured_in_a_graph(
    losses: Losses, backward: Callable[..., Any]
) -> None:
    for _ in range(BLOCK):
        backward((Scalar(1.0),), accumulate_grad=True)
    CAPTURES[0] = True
    for _ in range(BLOCK):
        backward((Scalar(2.0),), accumulate_grad=True)

    assert told(losses) is None
    CAPTURES[0] = False
    assert told(losses) == [1.0]


def test_losses_that_are_scaled_are_not_told(losses: Losses, backward: Callable[..., Any]) -> None:
    for _ in range(BLOCK):
        backward((Scalar(1.0),), accumulate_grad=True)
    assert told(losses) == [1.0]

    assert losses.tap_scale(lambda loss: 65536.0 * loss)(2.0) == 131072.0
    for _ in range(BLOCK):
        backward((Scalar(65536.0),), accumulate_grad=True)

    assert told(losses) == []
