"""Which checkpoint all nodes have in the end where each has a directory of its own; two leaders, as threads."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gpulaunch.checkpoint.messages import CheckpointError
from gpulaunch.checkpoint.nodes import Nodes
from gpulaunch.checkpoint.ranks import Ranks
from gpulaunch.checkpoint.replicas import whole_everywhere
from gpulaunch.checkpoint.store import Keep, Store
from gpulaunch.launcher.checkpoint.manifest import Manifest, ManifestFile, digest, verify

KEEP = Keep(newest=3, every=None)
GONE = "lost"


class Meeting:
    """Passes values between the leaders of two nodes, as collectives do."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=30)
        self._values: list[Any] = [None, None]

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class Leader:
    """The only rank of a node: what stands for `Ranks` and `Nodes`."""

    replicates = several = leads = True
    leaders = frozenset({0, 1})

    def __init__(self, meeting: Meeting, rank: int, breaks: int | None) -> None:
        self._meeting = meeting
        self.rank = rank
        self._breaks = breaks == rank

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.gather(self.rank, value)

    def from_leader(self, value: Any) -> Any:
        return value

    def share(self, value: Any, source: int) -> Any:
        return self.gather(value)[source]

    def first_problem(self, problem: str) -> str:
        return next((f"{text} (node {rank})" for rank, text in enumerate(self.gather(problem)) if text), "")

    def exchange(self, files: list[tuple[int, ManifestFile]], path: str, *, writes: bool) -> str:
        paths = self.gather(path)
        for source, file in files:
            if writes and not self._breaks:
                shutil.copy(Path(paths[source], file.name), path)
        self.gather(None)
        return "Input/output error" if self._breaks else ""


class Node:
    """A node's directory."""

    def __init__(self, directory: Path, run: str) -> None:
        self.store = Store(str(directory))
        self.store.owner = replace(self.store.owner, run=run)
        self.store.claim()

    def saves(self, generation: int, *steps: int, run: str = "") -> None:
        for step in steps:
            path = self.store.begin(step)
            file = Path(path, "data")
            file.write_text(f"{step} of {generation}")
            entry = ManifestFile(name="data", size_bytes=file.stat().st_size, sha256=digest(str(file)))
            manifest = Manifest(
                run=run, step=step, attempt=0, generation=generation, world_size=2, saved_s=1.0, files=(entry,)
            )
            self.store.commit(path, manifest, Keep(newest=None, every=None), None)

    def damages(self, step: int) -> None:
        Path(self.store.path_of(step), "data").write_text("x" * len(f"{step} of 1"))

    @property
    def has(self) -> list[tuple[int, int]]:
        return [(saved.generation, saved.step) for saved in self.store.complete()]


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Node, Node]:
    return Node(tmp_path / "a", "now"), Node(tmp_path / "b", "now")


def resumed(
    nodes: tuple[Node, Node], named: tuple[int | str, int | str], *, only: bool = False, breaks: int | None = None
) -> list[str]:
    """What each of them resumes from, after it was given the checkpoint of this step, or none; or the error."""
    meeting, outcome = Meeting(), ["", ""]

    def run(rank: int) -> None:
        node, step = nodes[rank], named[rank]
        leader = Leader(meeting, rank, breaks)
        path = node.store.path_of(step) if isinstance(step, int) else ""
        environ = {"GPULAUNCH_RESUME_FROM": path, "GPULAUNCH_CHECKPOINT_PER_NODE": "named" if only else "1"}
        try:
            found = whole_everywhere(path, node.store, cast("Ranks", leader), cast("Nodes", leader), KEEP, environ)
            outcome[rank] = found and Path(found, "data").read_text()
            if found:
                verify(found)
        except CheckpointError as err:
            outcome[rank] = str(err)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def test_a_node_that_lacks_it_receives_it(nodes: tuple[Node, Node]) -> None:
    nodes[0].saves(1, 10, 20)

    assert resumed(nodes, (20, GONE)) == ["20 of 1"] * 2
    assert nodes[1].has == [(1, 20)]


def test_the_newer_generation_counts_and_not_the_later_step(nodes: tuple[Node, Node]) -> None:
    """The first node was lost at step 50; the second has gone on from 30."""
    nodes[0].saves(1, 30, 40, 50)
    nodes[1].saves(1, 30)
    nodes[1].saves(2, 40)

    assert resumed(nodes, (50, 40)) == ["40 of 2"] * 2


def test_a_damaged_copy_is_replaced(nodes: tuple[Node, Node]) -> None:
    for node in nodes:
        node.saves(1, 10, 20)
    nodes[1].damages(20)

    assert resumed(nodes, (20, 20)) == ["20 of 1"] * 2
    verify(nodes[1].store.path_of(20))


def test_if_no_copy_is_whole_the_next_older_one_is_taken(nodes: tuple[Node, Node]) -> None:
    nodes[0].saves(1, 10, 20)
    nodes[0].damages(20)

    assert resumed(nodes, (20, GONE)) == ["10 of 1"] * 2


def test_but_not_in_place_of_the_one_that_the_user_has_named(nodes: tuple[Node, Node]) -> None:
    nodes[0].saves(1, 10, 20)
    nodes[0].damages(10)

    said = resumed(nodes, (10, GONE), only=True)
    assert said[0] == said[1]
    assert said[0].startswith("cannot resume: no node has a whole checkpoint; name another with --resume")


def test_without_any_whole_one_it_is_an_error_and_no_beginning(nodes: tuple[Node, Node]) -> None:
    nodes[0].saves(1, 20)
    nodes[0].damages(20)

    assert all("no node has a whole checkpoint" in said for said in resumed(nodes, (20, GONE)))


def test_where_there_is_none_all_begin(nodes: tuple[Node, Node]) -> None:
    assert resumed(nodes, (GONE, GONE)) == ["", ""]


def test_what_another_job_has_saved_at_later_steps_is_not_deleted(nodes: tuple[Node, Node]) -> None:
    """A job began anew on empty nodes, and the one with the checkpoints of before comes late."""
    nodes[0].saves(1, 298, 299, 300, run="before")
    nodes[1].saves(4, 16, run="now")

    assert resumed(nodes, (300, 16)) == ["16 of 4"] * 2
    nodes[0].saves(5, 17, 18, 19, 20, run="now")
    kept = sorted(path.name for path in Path(nodes[0].store.directory).glob("other-*"))
    assert kept == ["other-step-000000000298", "other-step-000000000299", "other-step-000000000300"]
    for name in kept:
        verify(str(Path(nodes[0].store.directory, name)))


@pytest.mark.parametrize("breaks", [0, 1])
def test_a_copy_that_fails_is_an_error_on_all_and_harms_nothing(nodes: tuple[Node, Node], breaks: int) -> None:
    nodes[0].saves(1, 20)

    said = resumed(nodes, (20, GONE), breaks=breaks)

    why = f"the checkpoint of step 20 cannot be copied: Input/output error (node {breaks})"
    assert said == [f"cannot resume: {why}"] * 2
    verify(nodes[0].store.path_of(20))
    assert not list(Path(nodes[1].store.directory).glob(".saving-*"))
