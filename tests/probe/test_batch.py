"""What a dataloader tells of itself, with stand-ins for tensors and for torch's iterator."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulaunch.profiler.channel import segment, segment_writer
from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.probe import worker_starts
from gpulaunch.profiler.probe.batch import LoaderWatch
from gpulaunch.profiler.probe.loader_queue import queue_of
from gpulaunch.profiler.probe.size import size_of, tensors_in

MS = 1_000_000


class Tensor:
    def __init__(self, *shape: int, item_bytes: int = 4) -> None:
        self.shape, self.dtype = shape, "torch.float32"
        self.nbytes = item_bytes * math.prod(shape)


class Sparse(Tensor):
    def __getattribute__(self, name: str) -> object:
        if name == "nbytes" and "nbytes" in vars(self):
            raise RuntimeError("a sparse tensor has no such size")
        return super().__getattribute__(name)


ENDLESS: list = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("batch", "samples", "size_bytes"),
    [
        (Tensor(32, 3, 8, 8), 32, 24576),
        ([Tensor(16, 3), Tensor(16, item_bytes=8)], 16, 320),
        ((Tensor(16, 3), Tensor(16)), 16, 256),
        ({"input_ids": Tensor(4, 128), "labels": Tensor(4, 128)}, 4, 4096),
        (UserDict(input_ids=Tensor(4, 128)), 4, 2048),
        (OrderedDict(name=["a", "b"], image=Tensor(2, 3)), 2, 24),
        ([{"image": Tensor(5, 3)}], 5, 60),
        ([Tensor(), Tensor(7, 2)], 7, 60),
        ([Tensor(6, 2), "a name", {"more": Tensor(6)}], 6, 72),
        ([Sparse(9, 100), Tensor(9)], 9, 36),
        (Tensor(), 0, 4),
        ("a string is not looked into", 0, 0),
        (None, 0, 0),
        ([], 0, 0),
        ([[[[[[Tensor(3)]]]]]], 0, 0),
        ([None] * 64 + [Tensor(3)], 0, 0),
        ([Tensor(2)] * 100, 2, 504),
        (ENDLESS, 0, 0),
    ],
)
def test_a_batch_has_samples_and_bytes(batch, samples, size_bytes):
    assert size_of(batch, Tensor) == (samples, size_bytes)


@pytest.mark.parametrize(
    ("batch", "tensors"),
    [
        (Tensor(32, 3), 1),
        ({"input_ids": Tensor(4, 128), "labels": Tensor(4, 128)}, 2),
        (((Tensor(3, 8),) * 40, ({"boxes": Tensor(2, 4), "labels": Tensor(2), "name": "a"},) * 40), 120),
        ([Tensor(2)] * 5000, 1023),
        ([[1.5] * 5000, Tensor(2)], 1),
        (ENDLESS, 0),
        ("text", 0),
    ],
)
def test_the_tensors_of_a_batch_are_counted(batch, tensors):
    assert tensors_in(batch, Tensor) == tensors


def an_iterator(
    tasks: dict, *, outstanding: int, received: int, queued: int, delivered: int | None = None
) -> SimpleNamespace:
    """As torch's, with workers; with `delivered`, a thread pins what they deliver."""
    lock = SimpleNamespace(_get_value=lambda: 100 - queued)
    queue = SimpleNamespace(qsize=lambda: queued, _maxsize=100, _sem=SimpleNamespace(_semlock=lock))
    return SimpleNamespace(
        _num_workers=2,
        _num_yielded=3,
        _task_info=tasks,
        _tasks_outstanding=outstanding,
        _rcvd_idx=received,
        _send_idx=12,
        _prefetch_factor=2,
        _data_queue=queue,
        _worker_result_queue=queue if delivered is None else SimpleNamespace(qsize=lambda: delivered),
        _index_sampler=None,
    )


AT_WORK = {7: (0,), 8: (1,), 9: (0,), 10: (1,)}
HEAD_IS_LATE = {7: (0,), 8: (1, "data"), 9: (0,), 10: (1, "data")}
HEAD_IS_THERE = {7: (0, "data"), 8: (1, "data"), 9: (0,)}


def test_the_end_of_an_epoch_which_stops_its_workers_counts_at_the_first_batch_of_the_next_one(watched):
    """Whatever is evaluated in between."""
    training, evaluation = (an_iterator(AT_WORK, outstanding=4, received=7, queued=0, delivered=None) for _ in range(2))
    training._num_yielded = evaluation._num_yielded = 1
    watched.gets(training)
    watched.watch.starts.ended(training, 30 * MS)
    watched.watch.starts.ended(training, 10 * MS)
    watched.watch.starts.ended(evaluation, 20 * MS)
    watched.watch.starts.started(evaluation, 90 * MS)
    watched.gets(evaluation, trains=False)
    watched.watch.starts.started(training, 70 * MS)
    watched.gets(training)
    watched.gets(training)
    seen = watched.seen()

    assert (seen.loader.epochs, seen.loader.first_wait_ns_total) == (3, (40 + 70 + 3 * 5) * MS)


@pytest.mark.parametrize(
    ("tasks", "outstanding", "queued", "delivered", "ready", "blocked", "backlog"),
    [
        (AT_WORK, 4, 0, None, 0, 0, 0),
        (AT_WORK, 4, 3, None, 3, 0, 0),
        (HEAD_IS_LATE, 2, 0, None, 2, 2, 0),
        (HEAD_IS_THERE, 1, 1, None, 3, 0, 0),
        ({}, 0, 0, None, 0, 0, 0),
        (AT_WORK, 4, 1, 3, 1, 0, 3),
        (HEAD_IS_LATE, 2, 2, None, 4, 0, 0),
    ],
    ids=[
        *("all at work", "some in the queue", "head of line is late", "next one is there", "drained"),
        *("pinning is slow", "all are there, in another order"),
    ],
)
def test_the_queue_tells_what_is_ready_and_what_waits(tasks, outstanding, queued, delivered, ready, blocked, backlog):
    iterator = an_iterator(tasks, outstanding=outstanding, received=7, queued=queued, delivered=delivered)

    assert queue_of(iterator) == (2, outstanding, ready, blocked, backlog)


class Watched:
    """A page with a watch, and what it said to be out of service."""

    def __init__(self, path: str) -> None:
        segment_writer.create(path, rank=0, local_rank=0, attempt=0)
        self.path = path
        self.writer = segment_writer.SegmentWriter(path)
        self.unavailable: dict[Hook, str] = {}
        self.watch = LoaderWatch(self.writer, self.unavailable.__setitem__, Tensor)

    def gets(self, iterator, *, after=None, wait_ns: int = 5 * MS, trains: bool = True, at_ns: int = 0) -> int:
        """A batch of 8 samples; `after`: how the iterator's tasks are when it has come."""
        asked = self.watch.asked(iterator, at_ns)
        if after is not None:
            iterator._task_info, iterator._tasks_outstanding = after
        return self.watch.handed(iterator, [Tensor(8, 2)], asked, at_ns, wait_ns, trains)

    def seen(self) -> segment.SegmentSnapshot:
        self.watch.flush()
        return segment.read(self.path)


@pytest.fixture
def watched(tmp_path: Path):
    watched = Watched(str(tmp_path / "rank-0.bin"))
    yield watched
    watched.writer.close()


def test_the_wait_for_the_first_batch_of_each_epoch_is_counted(watched):
    """Of training: an evaluation starts its own workers."""
    for yielded, trains in ((1, True), (2, True), (3, True), (1, True), (1, False), (2, True)):
        iterator = an_iterator(AT_WORK, outstanding=4, received=7, queued=0, delivered=None)
        iterator._num_yielded = yielded
        watched.gets(iterator, trains=trains)
    seen = watched.seen()

    assert (seen.loader.epochs, seen.loader.first_wait_ns_total) == (2, 10 * MS)


def test_the_start_of_the_workers_of_an_epoch_is_a_part_of_the_wait_for_its_first_batch(watched):
    """That of an evaluation's, which begins in between, is not."""
    training, evaluation = (an_iterator(AT_WORK, outstanding=4, received=7, queued=0, delivered=None) for _ in range(2))
    training._num_yielded = evaluation._num_yielded = 1
    watched.watch.starts.started(training, 40 * MS)
    watched.watch.starts.resumed(training, 30 * MS)
    watched.watch.starts.resumed(training, -1 * MS)  # it drew its indices faster than before
    watched.gets(training)
    watched.watch.starts.resumed(training, 25 * MS)  # those that persist, as in every epoch
    watched.gets(training)
    watched.watch.starts.started(evaluation, 90 * MS)
    watched.watch.starts.resumed(evaluation, 9 * MS)
    watched.gets(evaluation, trains=False)
    watched.gets(training)
    seen = watched.seen()

    assert (seen.loader.epochs, seen.loader.first_wait_ns_total) == (3, (70 + 3 * 5) * MS)


@pytest.mark.parametrize(
    ("steps_ms", "more_faults"),
    [((50, 20), 870), ((0, 50), 890)],
    ids=["one batch after the other", "fetches a batch ahead"],
)
def test_the_step_after_a_start_of_workers_is_looked_at_with_its_page_faults(
    watched, monkeypatch, steps_ms, more_faults
):
    """Not in the first epoch, nor in one that starts none."""
    faults = {50: 900, 20: 30, 0: 10}
    thread = SimpleNamespace(faults=0, now_ms=0)
    monkeypatch.setattr(worker_starts, "page_faults", lambda: thread.faults)
    for epoch in ("first", "starts workers", "does not"):
        iterator = an_iterator(AT_WORK, outstanding=4, received=7, queued=0, delivered=None)
        if epoch != "does not":
            watched.watch.starts.started(iterator, 5 * MS)
        for number, step_ms in enumerate((*steps_ms, 20, 20), 1):
            iterator._num_yielded = number
            watched.watch.handed(iterator, None, 0, thread.now_ms * MS, 0, True)
            thread.now_ms += step_ms
            thread.faults += faults[step_ms]
            watched.watch.asked(iterator, thread.now_ms * MS)
    seen = watched.seen().loader

    assert (seen.restarts, seen.shared_ns_total, seen.shared_faults) == (1, 50 * MS, more_faults)


def test_a_step_after_a_start_of_workers_that_is_not_observed_to_its_end_does_not_count(watched):
    iterator = an_iterator(AT_WORK, outstanding=4, received=7, queued=0, delivered=None)
    for asks_at in (1, 5):
        iterator._num_yielded = 1
        watched.watch.starts.started(iterator, 5 * MS)
        watched.watch.handed(iterator, None, 0, 0, 0, True)
        iterator._num_yielded = asks_at
        watched.watch.asked(iterator, 900 * MS)
    watched.watch.asked(iterator, 900 * MS)

    assert watched.seen().loader.restarts == 0
    assert not watched.watch.starts.looks


@pytest.mark.parametrize(
    ("tasks", "outstanding", "queued", "delivered", "after", "transfer_ms", "blocked_ms"),
    [
        (AT_WORK, 4, 0, None, None, 0, 0),
        (AT_WORK, 4, 1, None, None, 5, 0),
        (AT_WORK, 4, 0, 2, None, 5, 0),
        (HEAD_IS_THERE, 1, 0, None, ({9: (0,), 10: (1,)}, 2), 5, 0),
        (HEAD_IS_LATE, 2, 0, None, None, 0, 5),
        (AT_WORK, 4, 1, None, ({8: (1, "data"), 9: (0,), 10: (1,)}, 2), 0, 5),
        (AT_WORK, 4, 4, None, ({8: (1, "data"), 9: (0,), 10: (1,)}, 2), 5, 0),
        (HEAD_IS_LATE, 2, 2, None, ({8: (1, "data"), 9: (0,), 10: (1, "data")}, 1), 5, 0),
        (AT_WORK, 4, 0, None, ({8: (1, "data"), 9: (0,), 10: (1, "data"), 11: (1,)}, 2), 0, 5),
        (AT_WORK, 4, 0, None, ({8: (1, "data"), 9: (0,), 10: (1,), 11: (0,)}, 3), 0, 0),
    ],
    ids=[
        "nothing was there",
        "it was there",
        "it was with the thread that pins",
        "it had come before its turn",
        "others were there, put aside before",
        "what was there was another one",
        "all were there, in another order",
        "all were there, some put aside before",
        "nothing was there, and meanwhile the other worker had done all",
        "nothing was there, and the other worker is at work, too",
    ],
)
@pytest.mark.parametrize("known", [False, True], ids=["looked at", "known, and looked at a moment ago"])
def test_a_wait_is_for_workers_or_for_the_way_or_for_an_earlier_batch(
    watched, tasks, outstanding, queued, delivered, after, transfer_ms, blocked_ms, known
):
    iterator = an_iterator(tasks, outstanding=outstanding, received=7, queued=queued, delivered=delivered)
    if known:
        watched.gets(iterator, wait_ns=0)
    watched.gets(iterator, after=after, at_ns=1 * MS)
    seen = watched.seen()

    assert seen.loader.wait_ns_total == 5 * MS
    assert (seen.loader.transfer_ns_total, seen.loader.blocked_ns_total) == (transfer_ms * MS, blocked_ms * MS)


def test_waits_are_counted_by_length_and_batches_by_what_they_are_for(watched):
    iterator = SimpleNamespace(_num_workers=0, _num_yielded=2, _index_sampler=None)
    samples = [watched.gets(iterator, wait_ns=wait_ms * MS) for wait_ms in (0, 1, 2, 200_000)]
    watched.gets(iterator, trains=False)
    watched.gets(iterator, wait_ns=-1)  # another thread's
    seen = watched.seen()

    assert samples == [8, 8, 8, 8]
    assert (seen.loader.batches, seen.loader.eval_batches) == (6, 1)
    assert seen.loader.batch_bytes_total == 6 * 64
    assert seen.loader.wait_ns_total == 200_008 * MS
    assert seen.loader.wait_counts == (2, 1, 1, *[0] * 11, 1)


def test_the_queue_is_published_a_few_times_a_second(watched):
    watched.gets(an_iterator(AT_WORK, outstanding=4, received=7, queued=1), at_ns=1_000 * MS)
    watched.gets(an_iterator(AT_WORK, outstanding=4, received=7, queued=2), at_ns=1_199 * MS)
    too_soon = watched.seen()
    watched.gets(an_iterator(AT_WORK, outstanding=4, received=7, queued=3, delivered=2), at_ns=1_200 * MS)
    later = watched.seen()

    assert (too_soon.loader.ready, too_soon.loader.workers_configured) == (1, 2)
    assert (later.loader.ready, later.loader.pin_backlog) == (3, 2)


def test_of_a_queue_that_holds_something_one_number_is_read(watched):
    """All of it again when it is due."""
    iterator = an_iterator(AT_WORK, outstanding=4, received=7, queued=1)
    reads: list[str] = []
    iterator._data_queue.qsize = lambda: reads.append("all") or 1
    watched.gets(iterator)
    reads.clear()

    for at_ms in (50, 100, 150):
        watched.gets(iterator, at_ns=at_ms * MS)
    assert reads == []
    watched.gets(iterator, at_ns=200 * MS)
    assert reads == ["all"]


def test_a_queue_that_is_made_otherwise_is_read_whole(watched):
    iterator = an_iterator(AT_WORK, outstanding=4, received=7, queued=1)
    del iterator._data_queue._sem
    for at_ms in (0, 50):
        watched.gets(iterator, at_ns=at_ms * MS)
    seen = watched.seen()

    assert (watched.unavailable, seen.loader.ready, seen.loader.transfer_ns_total) == ({}, 1, 10 * MS)


def test_a_queue_of_an_evaluation_does_not_stay_for_training_without_workers(watched):
    watched.gets(an_iterator(AT_WORK, outstanding=4, received=7, queued=1), trains=False)
    evaluating = watched.seen()
    watched.gets(SimpleNamespace(_num_workers=0, _num_yielded=1, _index_sampler=None))
    training = watched.seen()

    assert (evaluating.loader.workers_configured, evaluating.loader.outstanding) == (2, 4)
    assert (training.loader.workers_configured, training.loader.outstanding) == (0, 0)


def test_a_torch_that_keeps_its_queue_elsewhere_costs_the_queue_only(watched):
    iterator = SimpleNamespace(_num_workers=2, _num_yielded=1, _index_sampler=None)
    watched.gets(iterator)
    watched.gets(iterator)
    seen = watched.seen()

    assert list(watched.unavailable) == [Hook.LOADER_QUEUE]
    assert "_task_info" in watched.unavailable[Hook.LOADER_QUEUE]
    assert (seen.loader.batches, seen.loader.wait_ns_total) == (2, 10 * MS)


def test_a_batch_that_will_not_be_looked_into_costs_the_samples_only(watched):
    class Stubborn(list):
        def __iter__(self):
            raise RuntimeError("do not look")

    iterator = SimpleNamespace(_num_workers=0, _num_yielded=2, _index_sampler=None)
    for _ in range(2):
        assert watched.watch.handed(iterator, Stubborn([1]), 0, 0, MS, True) == 0
    seen = watched.seen()

    assert list(watched.unavailable) == [Hook.SAMPLES]
    assert (seen.loader.batches, seen.loader.wait_ns_total, seen.loader.batch_bytes_total) == (2, 2 * MS, 0)
