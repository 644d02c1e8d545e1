"""What a program that saves tells through its page, with a page and no torch."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from gpulaunch.profiler.channel import segment, segment_writer
from gpulaunch.profiler.channel.segment import SegmentSnapshot
from gpulaunch.profiler.probe import inject, progress
from gpulaunch.profiler.probe.state import Probe

TORCH = SimpleNamespace(Tensor=object, cuda=SimpleNamespace(is_initialized=lambda: False))
Read = Callable[[], SegmentSnapshot]


@pytest.fixture
def read(tmp_path) -> Iterator[Read]:
    """This process is an armed rank; what its page says."""
    path = str(tmp_path / "rank-0.bin")
    segment_writer.create(path, rank=0, local_rank=0, attempt=0)
    probe = Probe(segment_writer.SegmentWriter(path), TORCH)
    inject.adopt(probe)
    yield lambda: segment.read(path)
    progress.checkpoint_failed()  # whatever save a test has begun is over
    inject.adopt(None)


def in_a_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_save_that_training_waits_for(read):
    before_ns = time.monotonic_ns()
    progress.checkpoint_began()
    during = read()
    progress.checkpoint_saved(step=100, captured_ns=before_ns, stall_ns=2_000, size_bytes=4096)
    after = read()

    assert before_ns <= during.checkpoint.blocking_since_ns <= time.monotonic_ns()
    assert (during.checkpoint.saves, after.checkpoint.saves) == (0, 1)
    assert after.checkpoint.blocking_since_ns == 0
    assert (after.checkpoint.step, after.checkpoint.captured_ns) == (100, before_ns)
    assert (after.checkpoint.stall_ns_total, after.checkpoint.last_stall_ns) == (2_000, 2_000)
    assert after.checkpoint.bytes_total == 4096


def test_a_save_in_the_background(read):
    """The training thread stands still while its state is copied, and again for the next one; the first one's commit
    comes from another thread meanwhile and does not say that the training thread goes on."""
    progress.checkpoint_began()
    progress.checkpoint_stalled(300)
    copied = read()
    progress.checkpoint_began()
    in_a_thread(lambda: progress.checkpoint_saved(step=100, captured_ns=7, stall_ns=0, size_bytes=10))
    committed = read()
    progress.checkpoint_stalled(500)
    in_a_thread(progress.checkpoint_failed)
    failed = read()

    assert (copied.checkpoint.saves, copied.checkpoint.blocking_since_ns, copied.checkpoint.last_stall_ns) == (
        0,
        0,
        300,
    )
    assert (committed.checkpoint.saves, committed.checkpoint.stall_ns_total) == (1, 300)
    assert committed.checkpoint.blocking_since_ns > 0
    assert (failed.checkpoint.stall_ns_total, failed.checkpoint.last_stall_ns) == (800, 500)
    assert (failed.checkpoint.saves, failed.checkpoint.failures) == (1, 1)
    assert (failed.checkpoint.step, failed.checkpoint.blocking_since_ns) == (100, 0)


def test_a_save_that_fails_where_training_waits_for_it_lets_it_go_on(read):
    progress.checkpoint_began()
    progress.checkpoint_failed()

    assert (read().checkpoint.failures, read().checkpoint.blocking_since_ns) == (1, 0)


def test_what_it_resumed_from_and_that_it_listens(read):
    before = read()
    progress.resumed(100)
    progress.listens()

    assert (before.checkpoint.resumed_step, before.listens) == (0, False)
    assert (read().checkpoint.resumed_step, read().listens) == (100, True)


def test_threads_that_tell_at_once_lose_nothing(read):
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def save() -> None:
        for _ in range(2000):
            progress.checkpoint_saved(step=1, captured_ns=1, stall_ns=3, size_bytes=5)

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval_s)

    assert (read().checkpoint.saves, read().checkpoint.bytes_total) == (8000, 40_000)
    assert read().checkpoint.stall_ns_total == 24_000


@pytest.mark.parametrize("nonsense", [-1, 1 << 64, 1.5, None, "100"])
def test_nonsense_is_not_raised_and_leaves_a_page_that_can_be_read(read, nonsense):
    progress.checkpoint_saved(step=nonsense, captured_ns=nonsense, stall_ns=nonsense, size_bytes=nonsense)
    progress.checkpoint_stalled(nonsense)
    progress.resumed(nonsense)
    seen = read()

    assert (seen.checkpoint.step, seen.checkpoint.stall_ns_total, seen.checkpoint.resumed_step) == (0, 0, 0)
    progress.checkpoint_saved(step=1, captured_ns=2, stall_ns=3, size_bytes=4)
    assert read().checkpoint.step == 1


def test_without_a_probe_nothing_happens():
    assert inject.current() is None
    progress.checkpoint_began()
    progress.checkpoint_stalled(1)
    progress.checkpoint_saved(step=1, captured_ns=1, stall_ns=1, size_bytes=1)
    progress.checkpoint_failed()
    progress.resumed(1)
    progress.listens()


def test_a_forked_child_leaves_the_page_alone(read):
    child = os.fork()
    if child == 0:
        progress.resumed(7)
        os._exit(0)
    os.waitpid(child, 0)

    assert read().checkpoint.resumed_step == 0


def test_a_save_that_training_waits_for_is_the_steps_checkpoint(read):
    """On the training thread; what another thread waits for is no part of a step."""
    probe = inject.current()
    assert probe is not None
    probe.mark_step()  # this thread trains
    probe.mark_step()
    progress.checkpoint_began()
    since_ns = read().checkpoint.blocking_since_ns
    time.sleep(0.01)
    progress.checkpoint_stalled(1)
    until_ns = time.monotonic_ns()

    in_a_thread(progress.checkpoint_began)
    in_a_thread(progress.checkpoint_failed)
    probe.mark_step()

    assert 10_000_000 <= read().phase_ns["checkpoint"] <= until_ns - since_ns
