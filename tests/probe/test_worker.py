"""Measuring a fetch, with stand-ins for torch: what the clocks say, and that the user's call is left alone."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.channel import workers
from gpulaunch.profiler.channel.workers import WorkerSlot
from gpulaunch.profiler.probe.worker import Clocks, Meter, spent, tap_fetch

FORK = multiprocessing.get_context("fork")
TORCH = SimpleNamespace(compiler=SimpleNamespace(is_dynamo_compiling=lambda: False))

MS = 1_000_000


def between(**grown: int) -> tuple[int, ...]:
    """What was spent when the clocks have grown by so much."""
    return spent(Clocks(*[7] * 6), Clocks(*(7 + grown.get(name, 0) for name in Clocks._fields)))


def test_wall_time_is_on_a_core_or_in_the_run_queue_or_blocked():
    times = between(wall_ns=100, thread_ns=30, process_ns=30, runqueue_ns=20, storage_bytes=5, read_bytes=15)

    assert times == (100, 30, 20, 50, 5, 10)


def test_what_other_threads_compute_meanwhile_is_not_waiting():
    assert between(wall_ns=100, thread_ns=10, process_ns=70, runqueue_ns=20) == (100, 70, 20, 10, 0, 0)


def test_other_threads_may_compute_more_than_there_is_time():
    assert between(wall_ns=100, thread_ns=10, process_ns=400, runqueue_ns=20) == (100, 80, 20, 0, 0, 0)


def test_clocks_of_different_grain_do_not_make_more_than_the_wall_time():
    assert between(wall_ns=100, thread_ns=101, process_ns=90, runqueue_ns=50) == (100, 100, 0, 0, 0, 0)


def test_what_is_mapped_is_read_from_storage_and_by_no_call():
    assert between(wall_ns=1, storage_bytes=4096, read_bytes=0)[4:] == (4096, 0)


clocks = st.builds(Clocks, *[st.integers(0, 1 << 62)] * 6)


@given(clocks, clocks)
def test_whatever_the_clocks_say_the_parts_sum_to_the_whole(before, after):
    wall_ns, *parts, storage_bytes, cached_bytes = spent(before, after)

    assert sum(parts) == wall_ns
    assert min(wall_ns, *parts, storage_bytes, cached_bytes) >= 0


class Fetcher:
    """As torch's: it collates what it fetches."""

    def __init__(self, collate: Callable[[Any], Any] = list, *, auto_collation: bool = True) -> None:
        self.collate_fn = collate
        self.auto_collation = auto_collation

    def fetch(self, possibly_batched_index: Any) -> Any:
        """A batch of as many as asked for."""
        return self.collate_fn([0] * possibly_batched_index)


class InWorker:
    """Runs things in a process that multiprocessing has forked from this one, which is the rank."""

    def __init__(self, path: str) -> None:
        workers.create(path)
        workers.claim(path)
        self.path = path

    def runs(self, body: Callable[[Callable[[Any, Any], Any], Meter], None]) -> tuple[WorkerSlot, ...]:
        """`body` gets the tapped fetch; it has to end well."""
        here = SimpleNamespace(_worker_info=None)
        meter = Meter(self.path, here, SimpleNamespace)
        tapped = tap_fetch(TORCH, meter, Fetcher.fetch)

        def work() -> None:
            here._worker_info = SimpleNamespace(id=5)
            body(tapped, meter)

        process = FORK.Process(target=work)
        process.start()
        process.join(60)
        assert process.exitcode == 0
        return workers.read(self.path)


@pytest.fixture
def in_worker(tmp_path: Path) -> InWorker:
    return InWorker(str(tmp_path / "workers-3.bin"))


def test_a_worker_measures_and_hands_on_what_was_fetched(in_worker):
    def body(fetch, meter):
        fetcher = Fetcher()
        assert fetch(fetcher, 3) == [0, 0, 0]
        assert fetch(fetcher, 2) == [0, 0]

    (slot,) = in_worker.runs(body)

    assert (slot.worker, slot.batches, slot.samples) == (5, 2, 5)
    assert slot.wall_ns == slot.cpu_ns + slot.runqueue_ns + slot.blocked_ns > slot.collate_ns > 0


def test_the_end_of_a_dataset_and_its_faults_pass_as_they_are(in_worker):
    def ends(data):
        time.sleep(0.01)
        raise StopIteration

    def body(fetch, meter):
        for _ in range(2):
            with pytest.raises(StopIteration):
                fetch(Fetcher(ends), 3)
        with pytest.raises(TypeError, match="an int is wanted"):
            fetch(Fetcher(lambda data: (_ for _ in ()).throw(TypeError("an int is wanted"))), 1)

    (slot,) = in_worker.runs(body)

    assert (slot.batches, slot.samples) == (0, 0)
    assert slot.collate_ns >= 20 * MS
    assert slot.blocked_ns >= 10 * MS


def test_samples_that_come_as_batches_are_counted_as_such(in_worker):
    """Without automatic batching a dataset gives batches, and `collate_fn` is torch's conversion."""
    batch = SimpleNamespace(shape=(7, 2), nbytes=56)

    def body(fetch, meter):
        assert fetch(Fetcher(lambda data: batch, auto_collation=False), 1) is batch

    (slot,) = in_worker.runs(body)

    assert (slot.batches, slot.samples) == (1, 7)


def test_samples_in_something_of_the_datasets_own_are_counted_in_the_batch(in_worker):
    """`__getitems__` may return what it likes, and what it returns may not like to be asked."""

    class Unasked(list):
        def __len__(self) -> int:
            raise RuntimeError("do not ask")

    class Own(Fetcher):
        def fetch(self, possibly_batched_index: Any) -> Any:
            return self.collate_fn(Unasked())

    batch = SimpleNamespace(shape=(7, 2), nbytes=56)

    def body(_, meter):
        assert tap_fetch(TORCH, meter, Own.fetch)(Own(lambda data: batch), 7) is batch

    (slot,) = in_worker.runs(body)

    assert (slot.batches, slot.samples) == (1, 7)


def test_a_collate_function_is_called_once_for_each_batch_whatever_epoch(in_worker):
    calls = []

    def body(fetch, meter):
        collate = calls.append
        for _ in range(2):  # another epoch, another fetcher
            fetcher = Fetcher(collate)
            fetch(fetcher, 1)
            fetch(fetcher, 1)
        assert len(calls) == 4

    (slot,) = in_worker.runs(body)

    assert slot.batches == 4


def test_a_fault_of_the_measuring_ends_it_and_nothing_else(in_worker):
    def body(fetch, meter):
        fetcher = Fetcher()
        assert fetch(fetcher, 3) == [0, 0, 0]
        for descriptor in os.listdir("/proc/self/fd"):  # a dataset that closes what it does not know
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{descriptor}").endswith(("/schedstat", "/io")):
                    os.close(int(descriptor))
        assert fetch(fetcher, 3) == [0, 0, 0]
        assert fetch(Fetcher(), 3) == [0, 0, 0]

    (slot,) = in_worker.runs(body)

    assert slot.batches == 1


def test_a_kernel_that_keeps_no_accounts_leaves_the_clocks(in_worker, monkeypatch, tmp_path):
    from gpulaunch.profiler.probe import worker

    (tmp_path / "schedstat").write_text("0 0 0\n")
    monkeypatch.setattr(worker, "SCHEDSTAT_PATH", str(tmp_path / "schedstat"))
    monkeypatch.setattr(worker, "IO_PATH", str(tmp_path / "no such file"))

    def body(fetch, meter):
        fetch(Fetcher(lambda data: time.sleep(0.02)), 3)

    (slot,) = in_worker.runs(body)

    assert (slot.knows_runqueue, slot.knows_io, slot.batches) == (False, False, 1)
    assert (slot.runqueue_ns, slot.storage_bytes, slot.cached_bytes) == (0, 0, 0)
    assert slot.blocked_ns >= 10 * MS


def test_a_worker_lets_its_stacks_be_read_once(in_worker, monkeypatch, tmp_path):
    """Under Yama only ancestors may, and who looks is none. (Whether a kernel has Yama cannot be chosen here.)"""
    said = tmp_path / "said"

    def prctl(option, pid, *_):
        with said.open("a") as once:
            once.write(f"{option:#x} {pid.value}\n")

    monkeypatch.setenv("GPULAUNCH_TRACER_PID", "4321")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(prctl=prctl))

    def body(fetch, meter):
        for _ in range(3):
            fetch(Fetcher(), 2)

    in_worker.runs(body)

    assert said.read_text() == "0x59616d61 4321\n"  # PR_SET_PTRACER


def test_outside_a_worker_nothing_is_measured_or_opened(in_worker):
    here = SimpleNamespace(_worker_info=None)
    fetcher = Fetcher()
    fetch = tap_fetch(TORCH, Meter(in_worker.path, here, SimpleNamespace), Fetcher.fetch)
    in_the_rank = fetch(fetcher, 2)
    here._worker_info = SimpleNamespace(id=0)  # as in a process that nobody has started
    in_no_worker = fetch(fetcher, 2)

    assert in_the_rank == in_no_worker == [0, 0]
    assert fetcher.collate_fn is list
    assert workers.read(in_worker.path) == ()
