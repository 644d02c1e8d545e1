"""What a tensor holds, read without an operation of torch's."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpulaunch.profiler.probe.dataset_state import state_of
from gpulaunch.profiler.probe.tensor_memory import memory_of, whole_numbers

pytestmark = pytest.mark.torch

NUMBERS = torch.arange(12).reshape(3, 4)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
def test_whole_numbers_of_a_part_of_a_tensor(kind: torch.dtype) -> None:
    part = NUMBERS.to(kind)[1:]

    read = whole_numbers(part, 8)
    assert np.array_equal(read, part.numpy())
    assert whole_numbers(part, 7) is None


@pytest.mark.parametrize(
    "tensor",
    [
        NUMBERS.t(),
        NUMBERS.to("meta"),
        NUMBERS.to_sparse(),
        NUMBERS[:0],
    ],
    ids=["transposed", "without memory", "sparse", "empty"],
)
def test_what_has_no_such_memory(tensor: torch.Tensor) -> None:
    assert memory_of(tensor) is None


def test_memory_that_was_given_back_is_not_read() -> None:
    tensor = torch.rand(9)
    tensor.untyped_storage().resize_(0)

    assert memory_of(tensor) is None


@pytest.mark.parametrize("values", [torch.rand(3, 4), torch.arange(9)])
def test_the_size_of_what_was_read_may_still_be_changed(values: torch.Tensor) -> None:
    dataset = SimpleNamespace(values=values)
    before = state_of(dataset)
    assert not state_of(dataset).differs(before)
    values[0] += 1
    assert state_of(dataset).differs(before)

    values.resize_(400)
    assert values.shape == (400,)
