"""Parts of a model whose gradients are all zero are found in graphs of torch itself (imported here: two seconds)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpulaunch.profiler.probe.graph import graph_below
from gpulaunch.profiler.probe.zero_gradients import ZeroGradients

X = torch.randn(16, 8)


def told(loss: Callable[[int], torch.Tensor], *parts: nn.Module, rows: int = 2) -> dict[str, float] | None:
    """What is known after some rows of three passes; the loss is given the number of its pass."""
    zeros = ZeroGradients(torch)
    for row in range(rows):
        zeros.begin()
        for number in range(3):
            of = loss(3 * row + number)
            zeros.add(graph_below(torch, (of,)))
            of.backward()
            zeros.passed()
            for part in parts:
                part.zero_grad()
    return zeros.fact()


def size(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_decoder_whose_loss_has_the_weight_0_is_computed_in_vain(sign: float) -> None:
    """Half of its zeros are -0.0. All of its products count, though backward goes on to the encoder below it."""
    encoder, head, decoder = (
        nn.Linear(8, 8),
        nn.Linear(8, 3),
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)),
    )

    def loss(_: int) -> torch.Tensor:
        hidden = encoder(X)
        return head(hidden).square().mean() + sign * 0.0 * (decoder(hidden) - X).square().mean()

    found = told(loss, encoder, head, decoder)

    assert found is not None
    assert found["elements"] == size(decoder)
    products = {part: sum(each.numel() for each in part.parameters()) for part in (encoder, head, decoder)}
    assert found["share"] == pytest.approx(products[decoder] / sum(products.values()), abs=0.02)
    assert told(loss, encoder, head, decoder, rows=1) is None, "only once it has been so for seconds"


@pytest.mark.parametrize(
    "kind", ["some weight", "no weight at first", "none from the second row on", "all", "no gradient"]
)
def test_what_has_an_effect_is_none(kind: str) -> None:
    encoder, decoder = nn.Linear(8, 8), nn.Linear(8, 8)
    weights = {"some weight": 1e-6, "no weight at first": 0.0, "none from the second row on": 1.0, "all": 0.0}

    def loss(number: int) -> torch.Tensor:
        hidden = encoder(X)
        if kind == "no gradient":
            return hidden.square().mean() + 0.0 * decoder(hidden.detach()).detach().mean()
        weight = weights[kind]
        if number >= 3 and kind in ("no weight at first", "none from the second row on"):
            weight = 1.0 - weight
        return (0.0 if kind == "all" else 1.0) * hidden.square().mean() + weight * decoder(hidden).square().mean()

    assert told(loss, encoder, decoder) is None


def test_zeros_in_most_places_are_not_enough() -> None:
    """Such as those of rows of an embedding that are not looked up."""
    table, head = nn.Embedding(1000, 8), nn.Linear(8, 3)

    assert told(lambda _: head(table(torch.tensor([510, 511]))).square().mean(), table, head) is None
