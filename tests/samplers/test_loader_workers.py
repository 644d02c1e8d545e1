"""Totals of dataloader workers, over workers, slots, attempts and sidecars."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulaunch.profiler.channel import workers
from gpulaunch.profiler.channel.workers import COUNTERS
from gpulaunch.profiler.record import AttemptGroup, LoaderWorkers, RankPlace
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.workers import WorkersSampler

WORKER = """
import os, sys
from gpulaunch.profiler.channel.workers import WorkersWriter

writer = WorkersWriter(sys.argv[1], parent_pid=os.getppid(), worker=0, knows=int(sys.argv[2]))
writer.add((2, 16, 1000, 600, 300, 100, 50, 4096, 8192))
print("added", flush=True)
sys.stdin.read()
"""


class Node:
    """A channel directory with this process as every rank, and its sampler."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.group: AttemptGroup | None = None
        self.ledger = MonotonicTotals()
        self.sampler = self.a_sampler()

    def a_sampler(self) -> WorkersSampler:
        return WorkersSampler(lambda: self.group, self.directory, self.ledger, clock=lambda: 0.0)

    def attempt(self, number: int, ranks: int) -> None:
        for rank in range(ranks):
            workers.create(self.path(rank))
            workers.claim(self.path(rank))
        places = tuple(RankPlace(rank=rank, local_rank=rank, pid=os.getpid()) for rank in range(ranks))
        self.group = AttemptGroup(
            run_id="0123456789abcdef", name="toy", attempt=number, world_size=ranks, node_rank=0, ranks=places
        )

    def path(self, rank: int) -> str:
        return str(self.directory / f"workers-{rank}.bin")

    def worker(self, rank: int, *, knows: int = 3) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, self.path(rank), str(knows)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "added\n"
        return process

    def worked(self, rank: int, **how: int) -> None:
        """A worker has come, worked and gone."""
        self.worker(rank, **how).communicate(timeout=60)

    def read(self) -> tuple[LoaderWorkers, ...]:
        reading = self.sampler.read(0.0)
        assert reading.errors == ()
        return reading.values


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.sampler.close()


def counts(of: LoaderWorkers) -> tuple[int, ...]:
    return tuple(getattr(of, name) for name in COUNTERS)


def times(number: int) -> tuple[int, ...]:
    return tuple(number * count for count in (2, 16, 1000, 600, 300, 100, 50, 4096, 8192))


def test_before_the_first_attempt_there_is_nothing(node):
    assert node.read() == ()


def test_a_rank_without_workers_is_left_out(node):
    node.attempt(0, ranks=2)
    node.worked(1)
    (rank,) = node.read()

    assert (rank.rank, rank.alive, rank.knows_runqueue, counts(rank)) == (1, 0, True, times(1))


def test_live_workers_are_known_by_their_pids(node):
    node.attempt(0, ranks=2)
    node.worked(1)
    with node.worker(1) as worker:
        node.read()
        assert (node.sampler.pids(0), node.sampler.pids(1), node.sampler.pids(2)) == ((), (worker.pid,), ())
        worker.stdin.close()
    node.read()

    assert node.sampler.pids(1) == ()


def test_workers_at_once_and_one_after_the_other_are_summed(node):
    node.attempt(0, ranks=1)
    node.worked(0)
    first, second = node.worker(0), node.worker(0)
    (living,) = node.read()
    first.communicate(timeout=60)
    second.communicate(timeout=60)
    (dead,) = node.read()

    assert (living.alive, counts(living)) == (2, times(3))
    assert (dead.alive, counts(dead)) == (0, times(3))


def test_totals_go_on_with_the_next_attempt(node):
    """What workers did since the last look is not lost with the file that they did it in."""
    node.attempt(0, ranks=1)
    node.worked(0)
    node.read()
    node.worked(0)
    node.attempt(1, ranks=1)
    (between,) = node.read()
    node.worked(0)
    (after,) = node.read()

    assert (counts(between), counts(after)) == (times(2), times(3))


def test_totals_go_on_with_the_next_sidecar(node, tmp_path):
    node.attempt(0, ranks=1)
    node.worked(0)
    node.read()
    node.ledger.save(tmp_path / "sidecar.json")
    node.sampler.close()
    node.ledger = MonotonicTotals()
    assert node.ledger.load(tmp_path / "sidecar.json")
    node.sampler = node.a_sampler()
    node.worked(0)

    assert [counts(rank) for rank in node.read()] == [times(2)]


def test_a_kernel_that_does_not_count_waiting_for_a_core_is_told(node):
    node.attempt(0, ranks=1)
    node.worked(0, knows=0)

    assert [rank.knows_runqueue for rank in node.read()] == [False]


def test_a_rank_that_is_gone_is_not_told_of(node):
    node.attempt(0, ranks=2)
    node.worked(0)
    node.worked(1)
    both = node.read()
    node.attempt(1, ranks=1)

    assert ([rank.rank for rank in both], [rank.rank for rank in node.read()]) == ([0, 1], [0])


def test_a_file_that_is_missing_is_no_error_and_a_damaged_one_costs_its_rank(node):
    node.attempt(0, ranks=3)
    node.worked(2)
    os.unlink(node.path(0))
    Path(node.path(1)).write_bytes(b"no file of workers")
    reading = node.sampler.read(0.0)

    assert [rank.rank for rank in reading.values] == [2]
    assert reading.errors == ("workers of rank 1: WorkersError",)
