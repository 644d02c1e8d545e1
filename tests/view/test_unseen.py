"""What no probe has seen is not known, and nobody is told a figure for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kept_run import state, training
from runs_on_disk import NOW_S, begin, held, keep, unseen

from gpulaunch.exporters.report.content import report_of
from gpulaunch.exporters.report.markdown import as_markdown
from gpulaunch.exporters.tui.once import once
from gpulaunch.exporters.tui.selection import marks_of
from gpulaunch.exporters.view.as_json import from_json, to_json
from gpulaunch.exporters.view.live import view_of_state
from gpulaunch.exporters.view.load import load_run
from gpulaunch.profiler.record import NodeState


@pytest.mark.parametrize("before", [False, True], ids=["null in its files", "0 in its files"])
def test_of_a_run_without_a_profiler_neither_steps_nor_work_are_told(tmp_path: Path, before: bool) -> None:
    view = from_json(json.loads(json.dumps(to_json(load_run(unseen(tmp_path / "run", before=before), now_s=NOW_S)))))

    assert (view.watched, view.steps, view.goodput_ratio) == (False, None, None)
    assert {bucket: value for bucket, value in view.goodput_seconds.items() if value != 0.0} == {
        "productive": None,
        "checkpoint_stall": None,
        "startup": 10.0,
    }
    for rank in view.ranks:
        assert (rank.steps, rank.samples, rank.step_seconds, rank.phase_seconds) == (None, None, None, {})
        assert rank.memory.rss_bytes == {"trainer": 300 << 20}

    shown = once(view, 80)
    assert "goodput unknown, no steps were observed; of 1m 50s: startup 10.0s" in shown
    assert "- steps" in shown
    assert "no steps lately" not in shown
    assert [row.split()[-1] for row in shown.splitlines() if "not measured" in row] == ["off", "off"]
    page = as_markdown(report_of(view))
    assert "; no step was observed on 2 ranks; goodput unknown." in page
    assert "the productive time is unknown" in page


def test_a_rank_without_a_probe_is_not_one_that_stands_still(tmp_path: Path) -> None:
    """Rank 0 makes ten steps a second; in rank 1 nothing is measured, and its page has the zeros it was made with."""

    def seen(at_s: float) -> NodeState:
        now = state(at_s)
        bare = replace(training(1, 0.0, 10.0), armed=False, step_source=None, last_step_monotonic_ns=None)
        return replace(now, training=(now.training[0], bare))

    run_dir = tmp_path / "run"
    begin(run_dir)
    keep(run_dir, [seen(second) for second in range(1, 60)])
    with held(run_dir):
        for view in (view_of_state(seen(60.0), run_dir=run_dir), load_run(run_dir, now_s=NOW_S)):
            measured, bare = view.ranks

            assert (measured.armed, bare.armed) == (True, False)
            assert (bare.steps, bare.steps_per_second_now, bare.phase_seconds, bare.loader) == (None, None, {}, None)
            assert bare.memory.rss_bytes
            assert marks_of(view)[1] == "off"
            assert view.steps == measured.steps
            assert view.steps_per_second_now == pytest.approx(10.0, abs=0.5)
            assert min(value for value in view.steps_per_second if value is not None) > 1.0


def test_without_a_dataloader_samples_are_not_known_and_not_0(tmp_path: Path) -> None:
    def seen(at_s: float) -> NodeState:
        now = state(at_s)
        return replace(now, training=tuple(replace(rank, samples=0, loader=None) for rank in now.training))

    run_dir = tmp_path / "run"
    begin(run_dir)
    keep(run_dir, [seen(second) for second in range(1, 60)])
    with held(run_dir):
        for view in (view_of_state(seen(60.0), run_dir=run_dir), load_run(run_dir, now_s=NOW_S)):
            assert view.steps
            assert (view.samples_per_second_now, view.samples_per_second) == (None, ())
            assert [rank.samples for rank in view.ranks] == [None, None]
            assert "- samples/s" in once(view, 100)
