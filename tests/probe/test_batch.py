"""What a dataloader tells of itself, with stand-ins for tensors and for torch's iterator."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import SimpleNamespace

import pytest

from gpulaunch.profiler.probe.batch import queue_of, samples_in


class Tensor:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


ENDLESS: list = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (Tensor(32, 3, 8, 8), 32),
        ([Tensor(16, 3), Tensor(16)], 16),
        ((Tensor(16, 3), Tensor(16)), 16),
        ({"input_ids": Tensor(4, 128), "labels": Tensor(4, 128)}, 4),
        (UserDict(input_ids=Tensor(4, 128)), 4),
        (OrderedDict(name=["a", "b"], image=Tensor(2, 3)), 2),
        ([{"image": Tensor(5, 3)}], 5),
        ([Tensor(), Tensor(7, 2)], 7),
        (Tensor(), 0),
        ("a string is not looked into", 0),
        (None, 0),
        ([], 0),
        ([[[[[[Tensor(3)]]]]]], 0),
        (["a", "b", "c", "d", Tensor(3)], 0),
        (ENDLESS, 0),
    ],
)
def test_samples_are_the_first_tensors_leading_dimension(batch, samples):
    assert samples_in(batch, Tensor) == samples


def an_iterator(tasks: dict, *, outstanding: int, received: int, queued: int) -> SimpleNamespace:
    return SimpleNamespace(
        _num_workers=2,
        _task_info=tasks,
        _tasks_outstanding=outstanding,
        _rcvd_idx=received,
        _data_queue=SimpleNamespace(qsize=lambda: queued),
    )


@pytest.mark.parametrize(
    ("tasks", "outstanding", "queued", "ready", "blocked"),
    [
        ({7: (0,), 8: (1,), 9: (0,), 10: (1,)}, 4, 0, 0, 0),
        ({7: (0,), 8: (1,), 9: (0,), 10: (1,)}, 4, 3, 3, 0),
        ({7: (0,), 8: (1, "data"), 9: (0,), 10: (1, "data")}, 2, 0, 2, 2),
        ({7: (0, "data"), 8: (1, "data"), 9: (0,)}, 1, 1, 3, 0),
        ({}, 0, 0, 0, 0),
    ],
    ids=["all at work", "some in the queue", "head of line is late", "next one is there", "drained"],
)
def test_the_queue_tells_what_is_ready_and_what_waits_for_an_earlier_batch(tasks, outstanding, queued, ready, blocked):
    iterator = an_iterator(tasks, outstanding=outstanding, received=7, queued=queued)

    assert queue_of(iterator) == (2, outstanding, ready, blocked)
