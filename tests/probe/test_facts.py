"""What a rank says about its surroundings: written when it has changed, by the rank alone, and never too much."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.profiler.probe import facts
from gpulaunch.profiler.samplers.facts import FactsFile


class Rank:
    """This process as a rank, with facts of its own."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "facts-3.json"
        self.sidecar = FactsFile(self.path)
        self.looks: list[str] = []
        self.failures: list[str] = []

    def start(self, look: Any = None) -> None:
        facts.start(str(self.path), look or (lambda: self.looks.append("")), self.failures.append)

    def read(self) -> dict[str, Any]:
        return dict(self.sidecar.read())


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(facts, "rank_facts", facts.Facts())
    yield Rank(tmp_path)
    facts.stop()


def test_before_the_start_nothing_is_written(rank):
    facts.set_fact("torch", "2.13.0")
    facts.flush()

    assert rank.read() == {}


def test_what_was_said_is_read_also_what_was_said_before_the_start(rank):
    facts.set_fact("torch", "2.13.0")
    rank.start()
    facts.set_fact("ddp", {"bucket_bytes": 100})
    facts.flush()

    assert rank.read() == {
        "version": 1,
        "torch": "2.13.0",
        "loaders": [],
        "device": None,
        "dataparallel": None,
        "ddp": {"bucket_bytes": 100},
    }
    assert rank.path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(rank.path.parent) == ["facts-3.json"]


def test_what_has_not_changed_is_not_written_again(rank):
    rank.start()
    facts.set_fact("loaders", [{"num_workers": 2}])
    facts.flush()
    first = rank.path.stat().st_ino
    facts.set_fact("loaders", [{"num_workers": 2}])
    facts.flush()
    same = rank.path.stat().st_ino
    facts.set_fact("loaders", [{"num_workers": 3}])
    facts.flush()

    assert first == same
    assert rank.read()["loaders"] == [{"num_workers": 3}]
    assert len(rank.looks) == 3


def test_what_is_looked_at_is_said_in_the_same_file(rank):
    rank.start(look=lambda: facts.set_fact("torch_threads", 4))
    facts.flush()

    assert rank.read()["torch_threads"] == 4


def test_a_forked_child_writes_nothing(rank):
    rank.start()
    child = os.fork()
    if child == 0:
        facts.set_fact("torch", "the child's")
        facts.flush()
        os._exit(0)
    os.waitpid(child, 0)

    assert (rank.read(), rank.looks) == ({}, [])


def test_long_lists_lose_their_last_entries(rank):
    rank.start()
    facts.set_fact("loaders", [{"site": f"{index} " + "x" * 1000} for index in range(50)])
    facts.flush()
    loaders = rank.read()["loaders"]

    assert rank.path.stat().st_size <= facts.FACTS_BYTES
    assert 10 < len(loaders) < 17
    assert loaders[0]["site"].startswith("0 ")


@pytest.mark.parametrize("fact", [{1, 2}, "x" * facts.FACTS_BYTES], ids=["no JSON", "too long"])
def test_a_fact_that_cannot_be_written_ends_the_writing(rank, fact):
    rank.start()
    facts.set_fact("torch", fact)
    facts.flush()
    facts.set_fact("torch", "2.13.0")
    facts.flush()

    assert len(rank.failures) == 1
    assert rank.read() == {}
    assert os.listdir(rank.path.parent) == []


def test_a_directory_that_is_gone_ends_the_writing_and_nothing_else(rank):
    rank.path.parent.rmdir()
    rank.start()
    facts.flush()
    facts.flush()
    rank.path.parent.mkdir()

    assert len(rank.failures) == 1
    assert "FileNotFoundError" in rank.failures[0]


def test_the_file_is_valid_json_for_anyone(rank):
    rank.start()
    facts.set_fact("dataparallel", 'train "x" \u00e9.py:3 main')
    facts.flush()

    assert json.loads(rank.path.read_bytes())["dataparallel"] == 'train "x" \u00e9.py:3 main'
