"""Stacks taken while ranks run: into which phase, into which file, and what is said when there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.profiler.channel import segment_writer
from gpulaunch.profiler.channel.layout import REGION_BITS, Region, Word
from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.record import AttemptGroup, RankPlace, Reading, StackState
from gpulaunch.profiler.samplers.folded import STACKS_FILE, Folded, load
from gpulaunch.profiler.samplers.pyspy import Look, PySpy
from gpulaunch.profiler.samplers.stacks import Stacks
from gpulaunch.profiler.stack import Frame

WAIT_S = 30.0
SEEN = Look(frames=(Frame(name="f", file="a.py", line=1),))
REFUSED = Look(failed="py-spy: permission denied")


@dataclass
class Scripted:
    """A sampler that sees what it is told to see."""

    sees: Callable[[int], Look] = lambda pid: SEEN
    missing: str = ""
    asked: list[int] = field(default_factory=list)
    name: str = "scripted"

    def absent(self) -> str:
        return self.missing

    def look(self, pid: int) -> Look:
        self.asked.append(pid)
        return self.sees(pid)


class Sampling:
    """The sampler of stacks, read as the sidecar reads it: no error is told twice, so all of them are kept."""

    def __init__(self, stacks: Stacks) -> None:
        self.stacks = stacks
        self.told: list[str] = []
        self.absent: set[str] = set()

    def read(self, *, later_s: float = 0.0) -> Reading[StackState]:
        reading = self.stacks.read(time.monotonic() + later_s)
        self.told.extend(reading.errors)
        self.absent.add(reading.absent)
        return reading

    @property
    def samples(self) -> dict[str, int]:
        return dict(self.read().values.samples)

    def until(self, condition: Callable[[], object]) -> None:
        until_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < until_s, "waited in vain"
            self.read()
            time.sleep(0.005)


class Node:
    """The agent's part: pages, group.json and the run directory."""

    def __init__(self, tmp_path: Path, ranks: int = 1) -> None:
        self.channel, self.run_dir = tmp_path / "channel", tmp_path / "run"
        self.file = self.run_dir / STACKS_FILE
        for directory in (self.channel, self.run_dir):
            directory.mkdir()
        self.pids = {rank: 100 + rank for rank in range(ranks)}
        (self.channel / "group.json").write_text(json.dumps({"run_dir": str(self.run_dir)}))
        self.opened: list[Stacks] = []
        self.writers: list[SegmentWriter] = []

    def group(self) -> AttemptGroup:
        ranks = tuple(RankPlace(rank=rank, local_rank=rank, pid=pid) for rank, pid in self.pids.items())
        return AttemptGroup(run_id="r", name="n", attempt=0, world_size=len(ranks), node_rank=0, ranks=ranks)

    def page(self, rank: int = 0) -> SegmentWriter:
        """A fresh page, written by this process."""
        while self.writers:  # the lock on a page is the process's: closed before the next is opened
            self.writers.pop().close()
        path = str(self.channel / f"rank-{rank}.bin")
        segment_writer.create(path, rank=rank, local_rank=rank, attempt=0)
        self.writers.append(SegmentWriter(path))
        return self.writers[0]

    def sampling(
        self, sampler: object, *, shortest_s: float = 0.01, goes_on: bool = True, **of_workers: Any
    ) -> Sampling:
        stacks = Stacks(
            self.channel,
            self.group,
            sampler=sampler,  # type: ignore[arg-type]
            shortest_s=shortest_s,
            goes_on=goes_on,
            **of_workers,
        )
        self.opened.append(stacks)
        return Sampling(stacks)

    def close(self) -> None:
        for stacks in self.opened:
            stacks.close()
        while self.writers:
            self.writers.pop().close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def edge(region: Region, edge_ns: int = 1000) -> int:
    return edge_ns << REGION_BITS | region


# -- sampling


def test_samples_are_counted_by_the_phase_that_the_page_tells(node: Node) -> None:
    writer, sampling = node.page(), node.sampling(Scripted())
    sampling.until(lambda: sampling.samples.get("startup"))
    writer.words[Word.LAST_EDGE] = edge(Region.FORWARD)
    sampling.until(lambda: sampling.samples.get("forward"))
    writer.words[Word.LAST_EDGE] = edge(Region.VALIDATION)
    sampling.until(lambda: sampling.samples.get("validation"))

    reading = sampling.read()
    assert set(reading.values.samples) <= {"startup", "forward", "validation", "unsettled"}
    assert (reading.absent, reading.errors, reading.values.source) == ("", (), "scripted")


def test_a_sample_that_an_edge_was_passed_in_is_unsettled(node: Node) -> None:
    writer = node.page()
    writer.words[Word.LAST_EDGE] = edge(Region.FORWARD)

    def passes_an_edge(pid: int) -> Look:
        writer.words[Word.LAST_EDGE] += 1 << REGION_BITS
        return SEEN

    sampling = node.sampling(Scripted(passes_an_edge))
    sampling.until(lambda: sampling.samples)

    assert list(sampling.samples) == ["unsettled"]


def test_the_page_of_the_next_attempt_is_found(node: Node) -> None:
    node.page().words[Word.LAST_EDGE] = edge(Region.BACKWARD)
    sampling = node.sampling(Scripted())
    sampling.until(lambda: sampling.samples.get("backward"))
    node.page().words[Word.LAST_EDGE] = edge(Region.OPTIMIZER)

    sampling.until(lambda: sampling.samples.get("optimizer"))


def test_a_worker_is_sampled_at_each_turn_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulaunch.profiler.samplers.stacks.rest_s", lambda *_, **__: 0.001)  # whatever a turn costs
    node, sampler, heard = Node(tmp_path, ranks=2), Scripted(), []
    of_rank = {0: (), 1: (7, 8)}
    sampling = node.sampling(sampler, workers=of_rank.__getitem__, heard_worker=lambda *each: heard.append(each))
    sampling.until(lambda: len(sampler.asked) >= 33)
    node.close()

    assert sampler.asked[:33] == [100, 101, 7] * 10 + [100, 101, 8]
    assert [(place.rank, frames) for place, frames in heard[:2]] == [(1, SEEN.frames)] * 2
    assert sum(sampling.samples.values()) <= len(sampler.asked) - len(heard), "they are none of a phase"


def test_ranks_take_turns(tmp_path: Path) -> None:
    node, sampler = Node(tmp_path, ranks=5), Scripted()
    node.sampling(sampler).until(lambda: len(sampler.asked) >= 10)
    node.close()

    assert sampler.asked[:10] == [100, 101, 102, 103, 104] * 2


def test_without_a_group_nobody_is_looked_into(node: Node) -> None:
    sampler = Scripted()
    stacks = Stacks(node.channel, lambda: None, sampler=sampler, shortest_s=0.001)
    for _ in range(5):
        stacks.read(time.monotonic())
        time.sleep(0.01)
    stacks.close()

    assert sampler.asked == []
    assert not node.file.exists()


def test_a_rank_that_has_ended_is_neither_sample_nor_failure(node: Node) -> None:
    sampler = Scripted(lambda pid: Look())
    sampling = node.sampling(sampler)
    sampling.until(lambda: len(sampler.asked) > 5)

    reading = sampling.read()
    assert (reading.values.samples, reading.absent, reading.errors) == ({}, "", ())


def test_what_a_look_costs_is_told(node: Node) -> None:
    sampler = Scripted(lambda pid: Look(frames=SEEN.frames, cpu_s=1e-6))
    sampling = node.sampling(sampler)
    sampling.until(lambda: sampling.read().values.cpu_s > 0)

    assert sampling.read().values.cpu_s >= 1e-6


# -- the file


def test_the_file_is_written_at_the_first_look_and_at_the_end(node: Node) -> None:
    sampler = Scripted()
    sampling = node.sampling(sampler)
    sampling.until(node.file.exists)
    sampling.until(lambda: len(sampler.asked) >= 5)
    sampling.stacks.close()

    assert load(node.file, Folded()).samples() == {"startup": len(sampler.asked)}


def test_the_next_sidecar_goes_on_with_it(node: Node) -> None:
    node.file.write_text("backward;main (a.py:1) 40\n")
    sampling = node.sampling(Scripted())
    sampling.until(lambda: sampling.samples.get("startup"))

    assert sampling.samples["backward"] == 40
    sampling.stacks.close()
    assert "backward;main (a.py:1) 40\n" in node.file.read_text()


def test_the_next_run_in_the_directory_begins_anew(node: Node) -> None:
    """What the run before was doing is nothing that this one does."""
    node.file.write_text("backward;of_the_run_before (train.py:1) 700\n")
    node.page()
    sampling = node.sampling(Scripted(), goes_on=False)
    sampling.until(lambda: sampling.samples.get("startup"))
    node.close()

    assert set(sampling.samples) == {"startup"}
    assert "of_the_run_before" not in node.file.read_text()


def test_a_file_that_cannot_be_read_is_not_replaced(node: Node) -> None:
    """Whatever it is, it is not ours to overwrite; samples are still counted."""
    node.file.mkdir()
    sampling = node.sampling(Scripted())
    sampling.until(lambda: sampling.samples.get("startup"))
    sampling.stacks.close()

    assert (sampling.told, sampling.absent) == ([f"{STACKS_FILE}: Is a directory"], {""})
    assert list(node.file.iterdir()) == []


def test_a_run_directory_that_is_gone_costs_the_file_only(node: Node) -> None:
    node.run_dir.rmdir()
    sampling = node.sampling(Scripted())
    sampling.until(lambda: sampling.told)

    assert sampling.told == [f"{STACKS_FILE}: No such file or directory"]
    assert sampling.samples["startup"] > 0


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"run_dir": 3}', "\xff"])
def test_a_damaged_group_costs_the_file_only(node: Node, content: str) -> None:
    (node.channel / "group.json").write_bytes(content.encode("latin-1"))
    sampling = node.sampling(Scripted())
    sampling.until(lambda: sampling.samples)
    sampling.stacks.close()

    assert len(sampling.told) == 1
    assert sampling.told[0].startswith(f"{STACKS_FILE}: no run directory")
    assert not node.file.exists()


# -- when there are no stacks


def test_without_a_sampler_the_reason_is_told(node: Node) -> None:
    sampler = Scripted(missing="py-spy: it is not installed")
    sampling = node.sampling(sampler)
    for _ in range(3):
        sampling.read()

    assert (sampling.absent, sampling.told, sampler.asked) == ({"py-spy: it is not installed"}, [], [])


def test_one_that_is_installed_later_starts(node: Node) -> None:
    sampler = Scripted(missing="py-spy: it is not installed")
    sampling = node.sampling(sampler)
    sampling.read()
    sampler.missing = ""

    sampling.until(lambda: sampling.samples)
    assert sampling.read().absent == ""


def test_where_no_thread_can_be_had_the_next_reading_tries_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may limit how many there are; the sidecar must not end of it, neither now nor when it closes."""
    node.page()
    sampling = node.sampling(Scripted())

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError):
            sampling.read()
        sampling.stacks.close()
    sampling.until(lambda: sampling.samples)


def test_looks_that_are_refused_are_told_and_tried_again(node: Node) -> None:
    permitted = threading.Event()
    sampler = Scripted(lambda pid: SEEN if permitted.is_set() else REFUSED)
    sampling = node.sampling(sampler, shortest_s=0.001)
    sampling.until(lambda: len(sampler.asked) > 6)

    assert sampling.read().absent == REFUSED.failed
    assert sampling.told == [REFUSED.failed] * 3  # from then on it is not there, which is no new error
    permitted.set()
    sampling.until(lambda: sampling.samples)
    assert sampling.read().absent == ""


def test_a_torn_look_now_and_then_is_an_error_and_no_absence(node: Node) -> None:
    torn = iter([SEEN, Look(failed="py-spy: torn"), SEEN, Look(failed="py-spy: torn")])
    sampling = node.sampling(Scripted(lambda pid: next(torn, SEEN)))
    sampling.until(lambda: sampling.samples.get("startup", 0) >= 5)

    assert (sampling.told, sampling.absent) == (["py-spy: torn"] * 2, {""})


def test_a_look_that_hangs_holds_up_nobody(node: Node) -> None:
    hangs, released = threading.Event(), threading.Event()

    def hang(pid: int) -> Look:
        hangs.set()
        released.wait(WAIT_S)
        return SEEN

    sampling = node.sampling(Scripted(hang))
    sampling.until(hangs.is_set)

    assert sampling.read().absent == ""
    assert sampling.read(later_s=60).absent.startswith("scripted: no answer for ")
    released.set()
    sampling.until(lambda: sampling.samples)
    assert sampling.read().absent == ""


def test_a_fault_of_ours_is_told_and_sampling_goes_on(node: Node) -> None:
    faults = iter([ZeroDivisionError(), KeyError()])

    def breaks(pid: int) -> Look:
        for fault in faults:
            raise fault
        return SEEN

    sampling = node.sampling(Scripted(breaks))
    sampling.until(lambda: sampling.samples)

    assert sampling.told == ["stacks: ZeroDivisionError", "stacks: KeyError"]


# -- with real processes

RANK = """
import sys, time
from gpulaunch.profiler.channel.layout import REGION_BITS, Region, Word
from gpulaunch.profiler.channel.segment_writer import SegmentWriter

writer = SegmentWriter(sys.argv[1])
def stay(region):
    writer.words[Word.LAST_EDGE] = time.monotonic_ns() << REGION_BITS | region
    print(region.name, flush=True)
    sys.stdin.readline()
def load(): stay(Region.LOADER)
def compute(): stay(Region.FORWARD)
for part in (load, compute, load):
    part()
"""


@pytest.mark.parametrize("sampler", [None, PySpy()], ids=["own reader", "py-spy"])
def test_a_real_rank_is_sampled_where_it_is(node: Node, sampler: PySpy | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as may be: that dear samples are seldom is told above."""
    monkeypatch.setattr("gpulaunch.profiler.samplers.stacks.rest_s", lambda *_, **__: 0.05)
    path = str(node.channel / "rank-0.bin")
    segment_writer.create(path, rank=0, local_rank=0, attempt=0)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", RANK, path], stdin=pipe, stdout=pipe) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        node.pids = {0: rank.pid}
        sampling = node.sampling(sampler, shortest_s=0.05)
        for region, phase in ((b"LOADER\n", "data_wait"), (b"FORWARD\n", "forward")):
            assert rank.stdout.readline() == region
            sampling.until(lambda phase=phase: sampling.samples.get(phase))
            rank.stdin.write(b"\n")
            rank.stdin.flush()
        sampling.stacks.close()
        rank.kill()

    found = load(node.file, Folded())
    for phase, function in (("data_wait", "load"), ("forward", "compute")):
        for labels, _ in found.stacks(phase):
            names = [label.partition(" ")[0] for label in labels]
            assert names == ["<module>", function, "stay"]
    assert sampling.read().values.cpu_s > 0
    assert os.listdir(node.run_dir) == [STACKS_FILE]
