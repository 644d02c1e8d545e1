"""What is found gets into the run directory, and a run directory that hangs holds up nobody.

A file system that has hung is played by an open() that does not come back before the test says so.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.exporters.files.findings import FINDINGS_FILE, read_findings
from gpulaunch.exporters.files.findings_writer import FindingsWriter
from gpulaunch.profiler.record import Collector, CollectorState, Finding, NodeState, SidecarState

WAIT_S = 30.0
WELL = CollectorState(available=True, reason="", errors=0, spent_s=0.0)
GC = Finding(
    rule="gc-pauses",
    file=None,
    line=None,
    subject="",
    ranks=(0,),
    seconds_per_step=0.02,
    seconds_per_hour=600.0,
    confidence=0.9,
    advice="Collect less.",
)


class Rank:
    """All that the keeper asks of one."""

    steps = 1


class Hanging:
    """Calls of open() in the run directory that wait as those of a hung mount do: without the interpreter's lock."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._open = os.open
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.waiting = threading.Event()

    def open(self, path: Any, *more: Any, **named: Any) -> int:
        if str(path).startswith(self._directory):
            self.waiting.set()
            assert self.goes_on.wait(WAIT_S)
            self.waiting.clear()
        return self._open(path, *more, **named)


class Run:
    """A sidecar's part, over a clock of the test's."""

    def __init__(self, directory: Path) -> None:
        self.run_dir, channel = directory / "run", directory / "channel"
        for each in (self.run_dir, channel):
            each.mkdir()
        (channel / "group.json").write_text(json.dumps({"run_dir": str(self.run_dir)}))
        self.file = self.run_dir / FINDINGS_FILE
        self.now_s = 1000.0
        self.keeper = FindingsWriter(channel, clock=lambda: self.now_s)

    def refresh(self, *findings: Finding, after_s: float = 1.0, ranks: tuple[Any, ...] = (Rank(),)) -> CollectorState:
        self.now_s += after_s
        state = NodeState(
            taken_monotonic_ns=0,
            taken_wall_ns=round(self.now_s * 1e9),
            group=None,
            training=ranks,
            processes=(),
            host=None,
            run=None,
            gpus=(),
            findings=findings,
            collectors={Collector.FINDINGS: WELL, Collector.HOST: WELL},
            sidecar=SidecarState(cpu_s=0.0, rss_bytes=None, refreshes=0, late_refreshes=0, refresh_s=0.0),
        )
        told = self.keeper.keep(state)
        assert replace(told, collectors=state.collectors) == state, "nothing else is changed"
        assert told.collectors[Collector.HOST] == WELL
        return told.collectors[Collector.FINDINGS]

    def rules(self) -> list[str]:
        return [found["rule"] for found in read_findings(self.file) if found["active"]]

    def until(self, condition: Callable[[], object]) -> None:
        until_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < until_s, "waited in vain"
            time.sleep(0.005)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.keeper.close()


@pytest.fixture
def hanging(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    hanging = Hanging(run.run_dir)
    monkeypatch.setattr(os, "open", hanging.open)
    yield hanging
    hanging.goes_on.set()


def test_what_is_found_gets_into_the_file(run: Run) -> None:
    assert run.refresh(GC) == WELL
    run.until(lambda: run.rules() == ["gc-pauses"])

    run.refresh()
    run.until(lambda: run.rules() == [])
    assert run.refresh() == WELL


def test_before_the_first_step_nobody_has_looked(run: Run) -> None:
    run.refresh(ranks=())
    run.keeper.close()

    assert not run.file.exists()


def test_the_last_state_is_written_at_the_end(run: Run) -> None:
    run.refresh(GC)
    run.until(run.file.exists)
    run.refresh(GC)
    run.keeper.close(within_s=WAIT_S)

    (found,) = read_findings(run.file)
    assert (found["first_seen_s"], found["last_seen_s"]) == (1001.0, 1002.0)


def test_a_run_directory_that_hangs_holds_up_no_refresh(run: Run, hanging: Hanging) -> None:
    hanging.goes_on.clear()
    run.refresh()
    assert hanging.waiting.wait(WAIT_S)
    threads = threading.active_count()
    conditions = [run.refresh(replace(GC, rule=f"rule-{number}")) for number in range(1000)]

    assert conditions[5] == WELL
    late = conditions[20]
    assert not late.available
    assert late.reason == "findings.jsonl: not written for 21 s"
    assert [each.errors for each in (late, conditions[-1])] == [1, 1], "told once, however long it takes"
    assert threading.active_count() == threads, "one thread is left there, not one for each refresh"

    hanging.goes_on.set()
    run.until(lambda: run.rules() == ["rule-999"])
    assert len(read_findings(run.file)) == 1, "the newest only: what it was not come to has not piled up"
    after = run.refresh(replace(GC, rule="rule-999"))
    assert (after.available, after.errors) == (True, 1)


def test_the_end_of_a_run_does_not_wait_for_a_run_directory_that_hangs(run: Run, hanging: Hanging) -> None:
    hanging.goes_on.clear()
    run.refresh(GC)
    assert hanging.waiting.wait(WAIT_S)
    run.keeper.close()

    assert hanging.waiting.is_set(), "it still hangs, and we are here"


def test_a_directory_that_cannot_be_written_to_is_told_and_tried_again(run: Run) -> None:
    draft = run.file.with_name(f"{FINDINGS_FILE}.tmp")
    draft.mkdir()
    run.refresh(GC)
    run.until(lambda: not run.refresh(GC, after_s=0.0).available)
    told = run.refresh(GC, after_s=0.0)
    assert told.reason == "findings.jsonl: Is a directory"
    assert told.errors >= 1

    draft.rmdir()
    run.until(lambda: run.refresh(GC).available)
    assert run.rules() == ["gc-pauses"]


@pytest.mark.parametrize("group", ["", "{}", "[]", '{"run_dir": 3}'])
def test_a_damaged_group_is_told(run: Run, tmp_path: Path, group: str) -> None:
    (tmp_path / "channel/group.json").write_text(group)

    run.until(lambda: not run.refresh(GC, after_s=0.0).available)


def test_the_trouble_of_the_findings_themselves_is_not_forgotten(run: Run) -> None:
    """Where nothing is wrong with the file, what the sidecar says of the collector stays."""
    state = CollectorState(available=False, reason="ZeroDivisionError", errors=3, spent_s=1.0)
    node = NodeState(
        taken_monotonic_ns=0,
        taken_wall_ns=0,
        group=None,
        training=(),
        processes=(),
        host=None,
        run=None,
        gpus=(),
        collectors={Collector.FINDINGS: state},
        sidecar=SidecarState(cpu_s=0.0, rss_bytes=None, refreshes=0, late_refreshes=0, refresh_s=0.0),
    )

    assert run.keeper.keep(node) is node
