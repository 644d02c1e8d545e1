"""Which share of the targets of a batch is ignored, in batches as loaders give them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gpulaunch.profiler.probe import facts
from gpulaunch.profiler.probe.targets import Targets

pytestmark = pytest.mark.torch


def tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


class Stubborn(list[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        raise RuntimeError("do not look")


IDS = np.ones((4, 10), np.int64)
ASKED = np.where(np.arange(10) < 2, IDS, -100)


@pytest.fixture(autouse=True)
def _facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "rank_facts", facts.Facts())


def told(*batches: Any) -> Any:
    targets = Targets()
    for batch in batches:
        for _ in range(8):
            targets.look(batch, torch.Tensor)
    return facts.rank_facts.known.get("targets")


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": tensor(IDS), "labels": tensor(ASKED)},
        UserDict(labels=tensor(ASKED)),
        [tensor(IDS), tensor(ASKED)],
        (tensor(IDS.astype(np.float32)), tensor(ASKED.ravel())),
    ],
)
def test_the_share_of_targets_that_are_ignored(batch: Any) -> None:
    assert told(batch) == {"rows": 40, "ignored": 0.8}


def test_it_is_a_mean_that_follows_a_change() -> None:
    few, all_but_one = np.where(np.arange(10) < 8, IDS, -100), np.where(np.arange(10) < 1, IDS, -100)

    assert told([tensor(ASKED)], [tensor(few)]) == {"rows": 40, "ignored": 0.5}
    assert told(*[[tensor(ASKED)]] * 9, *[[tensor(all_but_one)]] * 90) == {"rows": 40, "ignored": 0.9}


@pytest.mark.parametrize(
    "batch",
    [
        [tensor(IDS)],
        [tensor(ASKED).to("meta")],
        [tensor(ASKED.astype(np.float32))],
        [nn.Parameter(tensor(ASKED), requires_grad=False)],
        [tensor(ASKED).t()],
        [tensor(ASKED).to_sparse()],
        [tensor(np.where(np.arange(10) < 2, -70, ASKED))],
        [tensor(ASKED[None])],
        [tensor(np.full((1024, 512), -100))],
        [tensor(np.zeros((0, 9), np.int64))],
        [3, "text", None],
        tensor(ASKED),
        Stubborn([tensor(ASKED)]),
    ],
)
def test_what_is_no_target_or_must_be_waited_for_is_not_read(batch: Any) -> None:
    assert told(batch) is None


def test_batches_without_ignored_targets_are_a_part_of_the_mean() -> None:
    every = [tensor(IDS), tensor(IDS)]

    assert told(every, [tensor(IDS), tensor(ASKED)], every) == {"rows": 40, "ignored": 0.4}


def test_the_program_may_change_the_size_of_what_was_read() -> None:
    targets = tensor(ASKED).clone()
    told([targets])

    targets.resize_(400)
    assert targets.shape == (400,)
