"""Which share of the targets of a batch is ignored, with a stand-in for tensors whose array is NumPy's."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpulaunch.profiler.probe import facts
from gpulaunch.profiler.probe.targets import Targets


class Tensor:
    def __init__(self, array: Any, device: str = "cpu") -> None:
        self._array = np.asarray(array)
        self.shape = self._array.shape
        self.device = SimpleNamespace(type=device)

    def is_floating_point(self) -> bool:
        return self._array.dtype.kind == "f"

    def numel(self) -> int:
        return self._array.size

    def numpy(self) -> Any:
        return self._array


class Other(Tensor):
    pass


IDS = np.ones((4, 10), np.int64)
ASKED = np.where(np.arange(10) < 2, IDS, -100)


@pytest.fixture(autouse=True)
def _facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "rank_facts", facts.Facts())


def told(*batches: Any) -> Any:
    targets = Targets()
    for batch in batches:
        for _ in range(8):
            targets.look(batch, Tensor)
    return facts.rank_facts.known.get("targets")


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": Tensor(IDS), "labels": Tensor(ASKED)},
        UserDict(labels=Tensor(ASKED)),
        [Tensor(IDS), Tensor(ASKED)],
        (Tensor(IDS.astype(np.float32)), Tensor(ASKED.ravel())),
    ],
)
def test_the_share_of_targets_that_are_ignored(batch: Any) -> None:
    assert told(batch) == {"rows": 40, "ignored": 0.8}


def test_it_is_a_mean_that_follows_a_change() -> None:
    few, all_but_one = np.where(np.arange(10) < 8, IDS, -100), np.where(np.arange(10) < 1, IDS, -100)

    assert told([Tensor(ASKED)], [Tensor(few)]) == {"rows": 40, "ignored": 0.5}
    assert told(*[[Tensor(ASKED)]] * 9, *[[Tensor(all_but_one)]] * 90) == {"rows": 40, "ignored": 0.9}


@pytest.mark.parametrize(
    "batch",
    [
        [Tensor(IDS)],
        [Tensor(ASKED, device="cuda")],
        [Tensor(ASKED.astype(np.float32))],
        [Other(ASKED)],
        [Tensor(ASKED[None])],
        [Tensor(np.full((1024, 512), -100))],
        [Tensor(np.zeros((0, 9), np.int64))],
        [3, "text", None],
        Tensor(ASKED),
    ],
)
def test_what_is_no_target_or_must_be_waited_for_is_not_read(batch: Any) -> None:
    assert told(batch) is None
