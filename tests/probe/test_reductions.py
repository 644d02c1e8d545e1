"""Which reductions are of tensors that are the same on all ranks already. Imports torch: two seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from gpulaunch.profiler.probe import reductions
from gpulaunch.profiler.probe.reductions import Reductions

OWN = torch.tensor([0.0, 0.25, -1.5, 3.0, 0.0, 0.5, -0.125, 2.0, 1.0])
OTHERS = torch.tensor([0.0, 0.5, 1.5, -3.0, 1.0, 0.5, -0.5, 1.0, 1.0])


def reduce(told_to: Reductions, tensor: torch.Tensor, result: torch.Tensor, *, step: int, **kwargs: bool) -> None:
    before = told_to.before((tensor,), kwargs)
    tensor.copy_(result)
    told_to.after(sys._getframe(), tensor, int(tensor.nbytes), before, step=step)


def after(
    result: Callable[[torch.Tensor], torch.Tensor], *, dtype: torch.dtype = torch.float32, **kwargs: bool
) -> dict[str, object]:
    """What is told of ten steps of one line."""
    known = Reductions()
    for step in range(10):
        own = ((1 + step) * OWN).to(dtype)
        reduce(known, own, result(own), step=step, **kwargs)
    return known.told()


@pytest.mark.parametrize("result", [lambda own: own, lambda own: 2 * own, lambda own: 8 * own * (1 + 1e-6)])
def test_the_mean_and_the_sum_of_the_same_show_it(result: Callable[[torch.Tensor], torch.Tensor]) -> None:
    told = after(result)

    assert (told["same"], told["bytes"]) == (True, pytest.approx(OWN.nbytes, rel=0.05))
    assert str(told["line"]).startswith(("tests/probe/test_reductions.py:", "/"))


@pytest.mark.parametrize(
    "result",
    [
        lambda own: own + OTHERS,
        lambda own: (own + OTHERS) / 2,
        lambda own: torch.maximum(own, OTHERS),
        lambda own: own / 2,
        lambda own: own + (own == 0),
        lambda own: 0 * own,
        lambda own: -own,
        lambda own: own * float("inf"),
        lambda own: own * float("nan"),
    ],
    ids=["a sum", "a mean", "the largest", "a half", "slots of others", "nothing", "negated", "infinite", "none"],
)
def test_what_differs_between_ranks_is_none(result: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert after(result)["same"] is False


def test_what_cannot_be_read_is_not_known() -> None:
    assert after(lambda own: own, dtype=torch.float64)["same"] is False
    assert after(lambda own: own, async_op=True)["same"] is False
    assert after(torch.zeros_like)["same"] is False
    assert Reductions().before((), {}) == Reductions().before((torch.empty(9, device="meta"),), {}) == ()


def test_a_line_that_reduces_others_once_is_none() -> None:
    known = Reductions()
    for step in range(20):
        reduce(known, OWN.clone(), OTHERS if step == 13 else 2 * OWN, step=step)

    assert known.told()["same"] is False


def test_few_calls_are_read_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "CALLS", 3)
    known = Reductions()

    assert [len(known.before((OWN,), {})) > 0 for _ in range(5)] == [True, True, True, False, False]
    known.told()
    assert known.before((OWN,), {})
