"""Collectives of all ranks, over programs, attempts and sidecars."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulaunch.profiler.channel import collectives
from gpulaunch.profiler.channel.collectives import (
    CALL,
    COMPLETED,
    ENQUEUED,
    READABLE,
    RECORDER,
    SEQUENCE,
    UNREADABLE,
    words_of_call,
)
from gpulaunch.profiler.record import AttemptGroup, RankCollectives, RankPlace, Reading
from gpulaunch.profiler.samplers.collectives import CollectivesSampler
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals


class Node:
    """A channel directory, and its sampler."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.group: AttemptGroup | None = None
        self.ledger = MonotonicTotals()
        self.sampler = self.a_sampler()

    def a_sampler(self) -> CollectivesSampler:
        return CollectivesSampler(lambda: self.group, self.directory, self.ledger, clock=lambda: 0.0)

    def attempt(self, number: int, ranks: int = 1) -> None:
        places = tuple(RankPlace(rank=rank, local_rank=rank, pid=1) for rank in range(ranks))
        self.group = AttemptGroup(
            run_id="0123456789abcdef", name="toy", attempt=number, world_size=ranks, node_rank=0, ranks=places
        )

    def program(self, rank: int = 0) -> Program:
        assert self.group is not None
        path = str(self.directory / f"collectives-{rank}.bin")
        return Program(collectives.open_new(path, attempt=self.group.attempt))

    def reading(self) -> Reading[tuple[RankCollectives, ...]]:
        return self.sampler.read(0.0)

    def read(self) -> RankCollectives:
        reading = self.reading()
        assert (reading.errors, reading.absent) == ((), "")
        (one,) = reading.values
        return one


class Program:
    """What a program in a rank has called."""

    def __init__(self, words: memoryview) -> None:
        self.words = words

    def calls(self, kind: str, *, times: int = 1, returns: bool = True) -> None:
        counter, running, returned = words_of_call(kind)
        self.words[counter] += times
        self.words[CALL] = returned if returns else running

    def recorded(self, enqueued: int, completed: int) -> None:
        self.words[ENQUEUED], self.words[COMPLETED], self.words[SEQUENCE] = enqueued, completed, enqueued
        self.words[RECORDER] = READABLE


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.sampler.close()


def test_before_the_first_attempt_there_is_nothing_and_nothing_is_missed(node: Node) -> None:
    reading = node.reading()

    assert (reading.values, reading.absent, reading.errors) == ((), "", ())


def test_a_rank_without_a_file_or_without_a_collective_is_left_out(node: Node) -> None:
    node.attempt(0, ranks=3)
    node.program(1)
    node.program(2).calls("barrier")

    assert [one.rank for one in node.reading().values] == [2]


def test_a_rank_that_never_comes_back_says_from_what(node: Node) -> None:
    node.attempt(0)
    program = node.program()
    program.calls("all_reduce", times=7)
    program.recorded(9, 9)
    before = node.read()
    program.calls("barrier", returns=False)
    after = node.read()

    assert (before.last, before.running, before.calls) == ("all_reduce", False, {"all_reduce": 7})
    assert (after.last, after.running, after.calls) == ("barrier", True, {"all_reduce": 7, "barrier": 1})
    assert (after.enqueued, after.completed, after.sequence) == (9, 9, 9)


def test_what_the_recorder_has_not_said_is_not_known(node: Node) -> None:
    node.attempt(0)
    node.program().calls("wait")
    one = node.read()

    assert (one.enqueued, one.completed, one.sequence) == (None, None, None)


def test_totals_go_on_with_programs_attempts_and_sidecars(node: Node) -> None:
    node.attempt(0)
    first = node.program()
    first.calls("barrier")
    node.read()
    first.calls("barrier")  # since the last look: not lost with the file
    first.recorded(10, 9)
    second = node.program()
    second.calls("barrier")
    second.recorded(3, 3)
    assert node.read().calls == {"barrier": 3}
    node.attempt(1)
    waiting = node.read()
    third = node.program()
    third.calls("barrier", returns=False)
    third.recorded(2, 1)
    node.sampler.close()
    node.sampler = node.a_sampler()
    again = node.read()

    assert (waiting.calls, waiting.enqueued) == ({"barrier": 3}, 13)
    assert (waiting.last, waiting.sequence) == (None, None), "that was the attempt before"
    assert (again.calls, again.enqueued, again.completed) == ({"barrier": 4}, 15, 13)
    assert (again.last, again.running, again.sequence) == ("barrier", True, 2)


def test_a_recorder_that_cannot_be_asked_is_told_and_calls_are_counted_all_the_same(node: Node) -> None:
    node.attempt(0)
    program = node.program()
    program.calls("barrier")
    program.words[RECORDER] = UNREADABLE
    reading = node.reading()

    assert reading.absent == "torch's flight recorder cannot be asked"
    assert [one.calls for one in reading.values] == [{"barrier": 1}]


def test_a_damaged_file_is_an_error_and_leaves_the_others(node: Node) -> None:
    node.attempt(0, ranks=2)
    (node.directory / "collectives-0.bin").write_bytes(b"damaged")
    node.program(1).calls("barrier")
    reading = node.reading()

    assert reading.errors == ("collectives of rank 0: CollectivesError",)
    assert [one.rank for one in reading.values] == [1]
