"""How much of a batch is padding, by its attention mask."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from gpulaunch.profiler.probe import facts
from gpulaunch.profiler.probe.padding import Padding

pytestmark = pytest.mark.torch


def mask(*lengths: int, width: int = 100) -> Any:
    return (np.arange(width) < np.asarray(lengths)[:, None]).astype(np.int64)


@pytest.fixture(autouse=True)
def _facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "rank_facts", facts.Facts())


def told(batch: Any, looks: int = 64) -> Any:
    padding = Padding()
    for _ in range(looks):
        padding.look(batch, torch.Tensor)
    return facts.rank_facts.known.get("padding")


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", [dict, UserDict])
def test_columns_that_no_sample_needs_and_all_padding(kind: Any, left: bool) -> None:
    array = mask(10, 30, 20, 40)[:, :: -1 if left else 1].copy()

    assert told(kind(attention_mask=torch.from_numpy(array))) == {"width": 100, "unneeded": 0.6, "padded": 0.75}


def test_one_of_eight_batches_is_looked_at_and_eight_of_these_make_a_mean() -> None:
    batch = {"attention_mask": torch.from_numpy(mask(100, 50))}

    assert told(batch, looks=56) is None
    assert told(batch, looks=57) == {"width": 100, "unneeded": 0.0, "padded": 0.25}


def test_the_mean_follows_a_change() -> None:
    padding = Padding()
    for lengths in [(20, 20)] * 64 + [(100, 100)] * 500:
        padding.look({"attention_mask": torch.from_numpy(mask(*lengths))}, torch.Tensor)

    assert facts.rank_facts.known["padding"]["unneeded"] < 0.02


@pytest.mark.parametrize(
    "batch",
    [
        [torch.from_numpy(mask(3, 4))],
        {"input_ids": torch.from_numpy(mask(3, 4))},
        {"attention_mask": torch.from_numpy(mask(3, 4)).to("meta")},
        {"attention_mask": torch.from_numpy(mask(3, 4).astype(float))},
        {"attention_mask": torch.from_numpy(mask(3, 4)[None])},
        {"attention_mask": torch.from_numpy(np.zeros((0, 100), int))},
        {"attention_mask": torch.from_numpy(np.ones((1024, 1024), int))},
        {"attention_mask": mask(3, 4)},
        None,
    ],
    ids=["a list", "no mask", "on the GPU", "of floats", "of three dimensions", "empty", "large", "an array", "None"],
)
def test_other_batches_are_passed_over(batch: Any) -> None:
    assert told(batch) is None
