"""Reading beside the screen: not too often, and nobody waits for it."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import views

from gpulaunch.exporters.tui.reader import Reader, Request, Snapshot
from gpulaunch.exporters.tui.tail import LogPlace, Tail
from gpulaunch.exporters.view.model import RunView

WAIT_S = 30.0
"""What never comes fails the test after so long."""
LOG = LogPlace(node=0, attempt=0, rank=0, stream="stderr")


class Disk:
    """A run that is read from nowhere, and stops answering when told to."""

    def __init__(self, view: RunView) -> None:
        self.view = view
        self.answers = threading.Event()
        self.answers.set()
        self.reads: list[tuple[float, float | None]] = []
        self.faults: list[Exception] = []
        self.seen: queue.Queue[Snapshot] = queue.Queue()
        self.reader = Reader(Path("run"), self.seen.put, load=self.load, tail=self.tail)

    def load(self, run_dir: Path, window_s: float | None) -> RunView:
        self.reads.append((time.monotonic(), window_s))
        assert self.answers.wait(WAIT_S)
        if self.faults:
            raise self.faults.pop()
        return self.view

    def tail(self, run_dir: Path, place: LogPlace) -> Tail:
        return Tail(place=place, path="log", lines=("a line",))

    def next(self) -> Snapshot:
        return self.seen.get(timeout=WAIT_S)


@pytest.fixture
def disk() -> Iterator[Disk]:
    made = Disk(views.healthy())
    yield made
    made.answers.set()
    made.reader.close()


def test_it_reads_at_most_once_a_second_however_often_it_is_asked(disk: Disk) -> None:
    disk.reader.start()
    until_s = time.monotonic() + 2.5
    while time.monotonic() < until_s:
        for window_s in (60.0, 600.0, None):
            disk.reader.request(Request(window_s=window_s))
            time.sleep(0.01)

    times = [at_s for at_s, _ in disk.reads]
    assert len(times) >= 2
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= 0.9


def test_another_window_is_read_soon(disk: Disk) -> None:
    disk.view = views.finished()  # read every 5 s only
    disk.reader.start()
    assert disk.next().window_s is None

    disk.reader.request(Request(window_s=60.0))

    while disk.next().window_s != 60.0:
        pass
    assert [window_s for _, window_s in disk.reads] == [None, 60.0]


def test_a_log_is_read_when_it_is_wanted_and_not_before(disk: Disk) -> None:
    disk.reader.start()
    assert disk.next().log is None

    disk.reader.request(Request(log=LOG))

    seen = disk.next()
    assert (seen.log is not None and seen.log.lines, len(disk.reads)) == (("a line",), 1)


def test_a_disk_that_does_not_answer_holds_nobody_up(disk: Disk) -> None:
    disk.answers.clear()
    disk.reader.start()
    while not disk.reader.busy_seconds():
        time.sleep(0.01)

    disk.reader.request(Request(window_s=60.0))  # returns
    disk.reader.close()  # returns too

    assert disk.reader.busy_seconds() > 0
    assert disk.seen.empty()


def test_what_cannot_be_read_is_told_and_tried_again(disk: Disk) -> None:
    disk.faults = [RuntimeError("broken\x1b[2J")]
    disk.reader.start()

    first, second = disk.next(), disk.next()

    assert (first.view, first.trouble) == (None, "cannot read the run: RuntimeError: broken\\x1b[2J")
    assert (second.view, second.trouble) == (disk.view, "")
