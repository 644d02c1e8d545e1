"""Where the time of a run went, while it runs: what its counters hold too high is not shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kept_run import WALL_S, state
from runs_on_disk import begin, held, keep

from gpulaunch.exporters.view.live import view_of_state
from gpulaunch.exporters.view.load import load_run
from gpulaunch.exporters.view.model import RunView
from gpulaunch.profiler.record import NodeState


def seen(at_s: float, **buckets_s: float) -> NodeState:
    """The run began ten seconds before its ranks did; those are its startup."""
    before = state(at_s)
    assert before.run is not None
    goodput_ns = {**before.run.goodput_ns, **{bucket: round(value * 1e9) for bucket, value in buckets_s.items()}}
    return replace(before, run=replace(before.run, goodput_ns=goodput_ns))


def views(run_dir: Path, now: NodeState) -> list[RunView]:
    """As the page has it, and as somebody has it who reads the run's files."""
    begin(run_dir)
    keep(run_dir, [seen(now.taken_wall_ns / 1e9 - WALL_S - 1), now])
    with held(run_dir):
        return [view_of_state(now, run_dir=run_dir), load_run(run_dir, now_s=now.taken_wall_ns / 1e9)]


def test_work_that_is_lost_is_not_shown_as_done_as_well(tmp_path: Path) -> None:
    """At 100 s a rank died, and the newest checkpoint was 50 s old: the counter of steps that count stands still."""
    for view in views(tmp_path / "run", seen(100.0, productive=98.0, lost_work=50.0, detection=2.0)):
        assert {bucket: value for bucket, value in view.goodput_seconds.items() if value} == {
            "productive": pytest.approx(48.0),
            "lost_work": 50.0,
            "detection": 2.0,
            "startup": 10.0,
        }
        assert view.goodput_ratio == pytest.approx(48.0 / 110.0)
        assert view.goodput_ratio_over_time[-1] == pytest.approx(48.0 / 110.0, abs=0.02)


@pytest.mark.parametrize(
    "buckets_s",
    [
        {"productive": 48.0, "lost_work": 50.0, "detection": 2.0},  # all of it told
        {"productive": 90.0, "startup": 30.0},  # more than there was, but none of it was ever productive
        {"productive": 60.0, "lost_work": 20.0},  # told a while ago
    ],
)
def test_what_was_never_taken_back_is_shown_as_it_was_told(tmp_path: Path, buckets_s: dict[str, float]) -> None:
    for view in views(tmp_path / "run", seen(100.0, **buckets_s)):
        assert view.goodput_seconds["productive"] == pytest.approx(buckets_s["productive"])


def test_without_the_beginning_of_a_run_its_counters_are_all_there_is() -> None:
    view = view_of_state(seen(100.0, productive=98.0, lost_work=50.0))

    assert view.goodput_seconds["productive"] == pytest.approx(98.0)
