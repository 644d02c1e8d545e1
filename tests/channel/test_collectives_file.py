"""The file of a rank's collectives: what is written is what is read, and a damaged one is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulaunch.profiler.channel import collectives
from gpulaunch.profiler.channel.collectives import (
    CALL,
    COLLECTIVES_BYTES,
    COMPLETED,
    ENQUEUED,
    KINDS,
    READABLE,
    RECORDER,
    SEQUENCE,
    CollectivesError,
    CollectivesReader,
    words_of_call,
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "collectives-0.bin")


def test_a_new_file_says_who_writes_it_and_nothing_else(path: str) -> None:
    collectives.open_new(path, attempt=3)

    with CollectivesReader(path) as reader:
        seen = reader.read()

    assert (seen.attempt, seen.pid) == (3, os.getpid())
    assert seen.started_ns > 0
    assert (seen.last, seen.running, seen.recorder) == (None, False, 0)
    assert seen.calls == (0,) * len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_seen_while_it_runs_and_when_it_is_over(path: str, kind: str) -> None:
    words = collectives.open_new(path, attempt=0)
    counter, running, returned = words_of_call(kind)

    with CollectivesReader(path) as reader:
        words[counter] += 1
        words[CALL] = running
        inside = reader.read()
        words[CALL] = returned
        after = reader.read()

    assert (inside.last, inside.running) == (kind, True)
    assert (after.last, after.running) == (kind, False)
    assert dict(zip(KINDS, after.calls, strict=True)) == {**dict.fromkeys(KINDS, 0), kind: 1}


def test_what_the_recorder_says_is_read_back(path: str) -> None:
    words = collectives.open_new(path, attempt=0)
    words[ENQUEUED], words[COMPLETED], words[SEQUENCE], words[RECORDER] = 9, 8, 7, READABLE

    with CollectivesReader(path) as reader:
        seen = reader.read()

    assert (seen.recorder, seen.enqueued, seen.completed, seen.sequence) == (READABLE, 9, 8, 7)


def test_the_next_program_of_a_rank_has_a_file_of_its_own(path: str) -> None:
    first = collectives.open_new(path, attempt=0)
    with CollectivesReader(path) as reader:
        assert not reader.replaced()
        collectives.open_new(path, attempt=0)
        first[ENQUEUED] = 5

        assert reader.replaced()
        assert reader.read().enqueued == 5
        os.unlink(path)
        assert reader.replaced()


@pytest.mark.parametrize(
    "damage", [b"", b"short", bytes(COLLECTIVES_BYTES), b"gpulcoll" + b"\xff" * (COLLECTIVES_BYTES - 8)]
)
def test_what_is_no_such_file_is_refused(path: str, damage: bytes) -> None:
    Path(path).write_bytes(damage)

    with pytest.raises(CollectivesError):
        CollectivesReader(path)


def test_a_file_that_is_cut_short_is_no_harm_to_its_reader(path: str) -> None:
    collectives.open_new(path, attempt=0)

    with CollectivesReader(path) as reader:
        os.truncate(path, 100)

        with pytest.raises(CollectivesError):
            reader.read()


def test_a_call_of_no_known_kind_is_none(path: str) -> None:
    collectives.open_new(path, attempt=0)[CALL] = 99 << 1 | 1

    with CollectivesReader(path) as reader:
        assert reader.read().last is None
