"""What a report says first: of a run that goes on, by the hour; of one that is over, what was lost in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from reported import a_finding, a_run

from gpulaunch.exporters.report.document import Paragraph, Table
from gpulaunch.exporters.report.losses import headline, section
from gpulaunch.exporters.view.model import RunView, Status

LONG = replace(a_finding(1), rule="sync-every-step", seconds_per_hour=100.0, lost_seconds=9.0)
SHORT = replace(a_finding(2), rule="straggler", seconds_per_hour=600.0, lost_seconds=3.0)
NOTHING = replace(a_finding(3), rule="recompiles", seconds_per_hour=900.0, lost_seconds=0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    directory: Path = tmp_path_factory.mktemp("losses") / "run"
    return replace(a_run(directory), findings=(NOTHING, SHORT, LONG), elapsed_seconds=110.0, goodput_seconds={})


def test_a_run_that_is_over_is_told_what_it_lost(run: RunView) -> None:
    first, second = headline(replace(run, status=Status.FINISHED))

    assert first.startswith("sync-every-step at train.py:1: 9 s of this run, 1 ms of every step.")
    assert second.startswith("straggler at train.py:2: 3 s of this run")


def test_a_run_that_goes_on_is_told_what_it_loses(run: RunView) -> None:
    standing = tuple(replace(found, active=True) for found in run.findings)
    told = headline(replace(run, status=Status.RUNNING, findings=standing))

    assert [each.split()[0] for each in told] == ["recompiles", "straggler", "sync-every-step"]
    assert "3 ms of every step, 15 min 00 s of every hour" in told[0]


def test_a_run_that_goes_on_is_not_told_first_what_it_does_not_lose_any_more(run: RunView) -> None:
    """Somebody has mended the two dearest: they are in the table, and the first line is what is left."""
    (told,) = headline(replace(run, status=Status.RUNNING, findings=(replace(LONG, active=True), NOTHING, SHORT)))

    assert told.startswith("sync-every-step at train.py:1: ")


def test_memory_that_is_full_soon_leads(run: RunView) -> None:
    full = replace(a_finding(4), rule="host-memory-growth", seconds_per_step=0.0, seconds_per_hour=0.0, active=True)
    full = replace(full, evidence={"hours_to_full": 0.05}, advice="At this rate the memory is full in 3.0 minutes.")

    first, second = headline(replace(run, status=Status.RUNNING, findings=(full, replace(LONG, active=True))))

    assert first == "host-memory-growth at train.py:4: At this rate the memory is full in 3.0 minutes."
    assert second.startswith("sync-every-step at train.py:1: ")


@pytest.mark.parametrize("status", [Status.RUNNING, Status.FINISHED, Status.LOST])
def test_what_an_earlier_run_lost_is_told_as_such(run: RunView, status: Status) -> None:
    of_this = replace(LONG, active=True)
    earlier = replace(SHORT, lost_seconds=None, earlier=True)
    view = replace(run, status=status, findings=(of_this, earlier))

    (told,) = headline(view)
    assert told.startswith("sync-every-step at train.py:1: ")

    part = section(view)
    (table,) = (block for block in part.blocks if isinstance(block, Table))
    assert [row[4] for row in table.rows] == ["9 s", "no time"]
    assert table.rows[1][-1] == "only in an earlier run"
    (said,) = (
        block.text for block in part.parts[1].blocks if isinstance(block, Paragraph) and "every hour" in block.text
    )
    assert said == "Cost in an earlier run: 2 ms of every step, 10 min 00 s of every hour."
