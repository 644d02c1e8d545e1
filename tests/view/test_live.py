"""What a running sidecar shows: this moment from memory, the rest from its files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kept_run import GC, SYNC, state
from runs_on_disk import begin, end, keep

from gpulaunch.exporters.view.document import to_json
from gpulaunch.exporters.view.live import view_of_state
from gpulaunch.exporters.view.model import Status


def test_a_state_alone_is_a_view() -> None:
    view = view_of_state(state(10.0, findings=(SYNC,), gpu=True), earlier=state(5.0))

    json.dumps(to_json(view), allow_nan=False)
    assert (view.status, view.live, view.name, view.steps) == (Status.RUNNING, True, "demo", 100)
    assert view.steps_per_second_now == pytest.approx(10.0)
    assert view.recent_seconds == pytest.approx(5.0)
    assert (view.times_s, view.notes) == ((), ())
    assert [finding.rule for finding in view.findings] == ["sync-every-step"]
    assert view.devices[0].values["power_watts"] == 350.0


def test_before_the_first_look_back_there_is_no_pace() -> None:
    view = view_of_state(state(10.0))

    assert (view.steps, view.steps_per_second_now, view.phase_ratios_now) == (100, None, {})


def test_history_is_of_the_file_and_now_is_of_the_state(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    begin(run_dir, pid=2**22 + 1)
    keep(run_dir, [state(second, findings=(SYNC,)) for second in range(1, 60)])

    view = view_of_state(state(60.0, findings=(GC,)), run_dir=run_dir)

    assert (view.status, view.steps) == (Status.RUNNING, 600)
    assert len(view.steps_per_second) > 50
    assert view.steps_per_second_now == pytest.approx(10.0, abs=0.1)
    assert [(finding.rule, finding.active) for finding in view.findings] == [
        ("gc-pauses", True),
        ("sync-every-step", False),
    ]


def test_a_new_run_in_an_old_directory_shows_nothing_of_the_old_one_as_its_own(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    begin(run_dir)
    keep(run_dir, [state(second) for second in range(1, 60)])
    end(run_dir, 60)
    begin(run_dir, run_id="bbbb")
    fresh = state(2.0, run_id="bbbb")
    fresh = replace(fresh, taken_wall_ns=fresh.taken_wall_ns + 10**12)

    view = view_of_state(fresh, run_dir=run_dir)

    assert (view.run_id, view.steps, view.steps_per_second_now) == ("bbbb", 20, None)
    assert view.ranks[0].phase_seconds["forward"] == pytest.approx(1.5)
