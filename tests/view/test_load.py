"""A run directory, whole or in pieces, as one view."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kept_run import GC, SYNC, WALL_S, announce, line, state
from runs_on_disk import NOW_S, PRODUCTIVE, begin, closed, end, held, keep, whole, write

from gpulaunch.exporters.files.findings import FindingsFile
from gpulaunch.exporters.files.rows import rows_of
from gpulaunch.exporters.store.telemetry_writer import TelemetryWriter
from gpulaunch.exporters.view.as_json import from_json, to_json
from gpulaunch.exporters.view.attempts import history_of
from gpulaunch.exporters.view.live import view_of_state
from gpulaunch.exporters.view.load import load_run
from gpulaunch.exporters.view.model import RunView, Status
from gpulaunch.profiler.channel.layout import PHASES


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def load(run_dir: Path, **named: float) -> RunView:
    """Load it, and see that it is fit for a page whatever it is."""
    view = load_run(run_dir, **{"now_s": NOW_S, **named})  # type: ignore[arg-type]
    json.dumps(to_json(view), allow_nan=False)
    return view


# -- what there is


def test_a_run_that_went_well(run_dir: Path) -> None:
    view = load(whole(run_dir))

    assert (view.status, view.exit_code, view.name, view.run_id) == (Status.FINISHED, 0, "demo", "aaaa")
    assert (view.command, view.world_size, view.notes) == (("gpulaunch", "train.py"), 2, ())
    assert (view.began_s, view.ended_s, view.elapsed_seconds) == (WALL_S - 10, WALL_S + 100, 110.0)
    assert view.goodput_ratio == 0.9
    assert [(attempt.number, attempt.status, attempt.cause) for attempt in view.attempts] == [
        (0, Status.FINISHED, None)
    ]
    assert view.steps == 990
    assert view.watched


def test_now_is_the_last_half_minute(run_dir: Path) -> None:
    begin(run_dir)
    with held(run_dir):
        keep(run_dir, [state(second) for second in range(1, 100)])
        view = load(run_dir)

    assert view.status is Status.RUNNING
    assert view.recent_seconds == pytest.approx(30.0, abs=1.0)
    assert view.steps_per_second_now == pytest.approx(10.0)
    assert view.samples_per_second_now == pytest.approx(640.0)
    assert view.step_seconds_now == pytest.approx(0.1)
    assert view.ranks[0].phase_ratios_now["forward"] == pytest.approx(0.75)
    assert view.ranks[1].phase_ratios_now["data_wait"] == pytest.approx(0.75)
    assert view.phase_ratios_now["backward"] == pytest.approx(0.25)
    assert list(view.phase_ratios_now) == list(PHASES)
    assert view.ranks[0].cores_now["trainer"] == pytest.approx(0.95)


def test_a_run_that_is_over_has_no_now_but_the_means_of_all_its_steps(run_dir: Path) -> None:
    """They are those that the launcher tells at its end, whatever its last half minute was like."""
    begin(run_dir)
    slow_at_last = [
        replace(state(60 + second / 3), taken_wall_ns=state(60 + second).taken_wall_ns) for second in range(30)
    ]
    keep(run_dir, [*(state(second) for second in range(1, 60)), *slow_at_last])
    end(run_dir, 90)

    view = load(run_dir)
    rank = view.ranks[0]
    assert rank.steps is not None
    assert rank.step_seconds is not None
    assert rank.samples is not None

    assert view.status is Status.FINISHED
    assert rank.steps_per_second_now == view.steps_per_second_now == pytest.approx(rank.steps / rank.step_seconds)
    assert rank.step_seconds_now == view.step_seconds_now == pytest.approx(rank.step_seconds / rank.steps)
    assert view.samples_per_second_now == pytest.approx(2 * rank.samples / rank.step_seconds)
    assert rank.phase_ratios_now["forward"] == pytest.approx(0.75)
    assert rank.cores_now == {}


def test_curves_share_one_axis_and_say_what_was_done(run_dir: Path) -> None:
    """Fast for a minute, then at a third of the pace: the curve has both, and none of the ends is made up."""
    begin(run_dir)
    fast = [state(second) for second in range(1, 61)]
    slow = [state(60 + second / 3) for second in range(1, 61)]
    slow = [
        replace(
            each,
            taken_monotonic_ns=fast[-1].taken_monotonic_ns + second * 10**9,
            taken_wall_ns=fast[-1].taken_wall_ns + second * 10**9,
        )
        for second, each in enumerate(slow, 1)
    ]
    keep(run_dir, [*fast, *slow])
    end(run_dir, 120)

    view = load(run_dir, max_points=24)

    assert len(view.times_s) == 24
    assert view.interval_seconds == pytest.approx(5.0, abs=0.1)
    assert view.times_s[-1] == pytest.approx(WALL_S + 120, abs=0.01)
    for curve in (
        view.steps_per_second,
        view.samples_per_second,
        view.step_mean_seconds,
        view.goodput_ratio_over_time,
        *view.phase_ratios.values(),
        *(curve for rank in view.ranks for curve in (rank.steps_per_second, *rank.rss_bytes.values())),
    ):
        assert len(curve) == 24
    assert view.steps_per_second[2:10] == tuple(pytest.approx(10.0, abs=0.3) for _ in range(8))
    assert view.steps_per_second[14:] == tuple(pytest.approx(3.33, abs=0.3) for _ in range(10))
    assert view.ranks[1].phase_ratios["data_wait"][5] == pytest.approx(0.75, abs=0.01)
    assert "optimizer" not in view.phase_ratios  # there was none


def test_steps_whose_times_nobody_told_do_not_make_the_others_shorter(run_dir: Path) -> None:
    """A rank that was killed had made a thousand, and told the times of nine hundred."""
    begin(run_dir)
    end(run_dir, 100)
    phases = {"forward": 60.0, "backward": 30.0}
    told = {"steps": 1000, "timed_steps": 900, "samples": 0, "step_seconds": 90.0, "phase_seconds": phases}
    write(run_dir, "summary.json", {"version": 1, "exit_code": 0, "error": "", "ranks": {"0": told}})

    view = load(run_dir)

    assert view.steps == 1000
    assert (view.steps_per_second_now, view.step_seconds_now) == (pytest.approx(10.0), pytest.approx(0.1))


def test_all_stretches_together_have_made_the_steps_of_the_run(run_dir: Path) -> None:
    """Ranks that are not there yet, or not for a while, make none; what they made until they were seen counts."""
    begin(run_dir)
    there = {*range(4, 9), *range(11, 16)}
    keep(run_dir, [state(second, ranks=(0, 1) if second in there else ()) for second in range(1, 16)])
    end(run_dir, 15)

    view = load(run_dir)

    assert view.steps == 150
    for curve, whole_run in ((view.steps_per_second, 150), (view.samples_per_second, 2 * 32 * 150)):
        assert sum(value for value in curve if value is not None) * view.interval_seconds == pytest.approx(whole_run)
        assert {curve.index(value) for value in curve if value is None} == {0}, "nobody is there before the first look"


def test_they_have_in_folded_rows_too(run_dir: Path) -> None:
    """Of which the first has what was made until the first look, and since."""
    begin(run_dir)
    keep(run_dir, [state(second) for second in range(1, 1201)])
    end(run_dir, 1200)

    view = load(run_dir, max_points=20)

    made = sum(value for value in view.steps_per_second if value is not None) * view.interval_seconds
    assert made == pytest.approx(12_000, rel=0.01)
    assert min(value for value in view.steps_per_second if value is not None) > 9.0


def test_of_a_run_whose_beginning_is_not_kept_no_steps_are_made_up(run_dir: Path) -> None:
    begin(run_dir)
    keep(run_dir, [state(second) for second in range(1, 61)])
    end(run_dir, 60)

    view = load(run_dir, window_s=20.0)

    assert max(value for value in view.steps_per_second if value is not None) == pytest.approx(10.0)


def test_a_window_shows_the_end_only(run_dir: Path) -> None:
    view = load(whole(run_dir), window_s=20.0)

    assert view.times_s[0] > WALL_S + 75
    assert view.steps == 990


def test_the_parts_of_a_rank(run_dir: Path) -> None:
    view = load(whole(run_dir, gpu=True))

    rank = view.ranks[0]
    assert (rank.local_rank, rank.pid, rank.armed, rank.step_source) == (0, 4000, True, "optimizer")
    assert (rank.steps, rank.samples) == (990, 31680)
    assert rank.phase_seconds["forward"] == pytest.approx(74.25, abs=0.01)
    assert rank.last_step_s == pytest.approx(WALL_S + 99, abs=0.1)
    assert rank.loader is not None
    assert (rank.loader.batches, rank.loader.ready, rank.loader.workers_alive) == (990, 2, 2)
    (copies,) = rank.copies
    assert (copies.direction, copies.host_memory, copies.size_bytes) == ("h2d", "pageable", 990 * 4096)
    assert rank.copy_bytes_per_second["h2d"][5] == pytest.approx(40960.0)
    assert [(sync.kind, sync.calls) for sync in rank.syncs] == [("item", 990)]
    assert rank.memory.pss_bytes == {"trainer": 60 << 20}
    assert rank.memory.gpu_bytes["allocated"] == 1 << 20
    assert rank.collectives is not None
    assert (rank.collectives.calls, rank.collectives.completed) == ({"all_reduce": 99}, 99)
    assert rank.cost is not None
    assert (rank.cost.parts_unavailable, rank.cost.fault) == (("gpu_time",), "GPU_TIME: no GPU")
    (device,) = view.devices
    assert (device.uuid, device.model, device.values["utilization_ratio"]) == ("GPU-a", "NVIDIA H200", 0.5)
    assert device.curves["pcie_receive_bytes_per_second"][5] == pytest.approx(1 << 20)
    (site,) = view.sites
    assert (site.text, site.ranks, site.count) == ("train.py:88 main", (0, 1), 1980)
    assert [(each.name, each.available, each.reason) for each in view.collectors] == [
        ("ranks", True, ""),
        ("gpu", False, "no NVIDIA driver"),
    ]
    (node,) = view.nodes
    assert node.values["memory_total_bytes"] == 1 << 34
    assert node.sidecar_cores[5] == pytest.approx(0.01, abs=1e-3)


def test_ranks_that_have_ended_before_the_last_look_are_still_there(run_dir: Path) -> None:
    begin(run_dir)
    keep(run_dir, [*(state(second) for second in range(1, 30)), *(state(second, ended=True) for second in (30, 31))])
    end(run_dir, 31)

    view = load(run_dir)

    assert [rank.steps for rank in view.ranks] == [290, 290]
    assert view.steps_per_second_now == pytest.approx(10.0)


def test_findings_have_their_line_and_what_they_have_cost(run_dir: Path) -> None:
    """findings.jsonl says what stands, the telemetry what it came to."""
    begin(run_dir)
    file = FindingsFile(run_dir / "findings.jsonl")
    file.tell((SYNC, GC), WALL_S + 1)
    file.tell((SYNC,), WALL_S + 50)
    keep(run_dir, [state(second, findings=(SYNC, GC) if second < 50 else (SYNC,)) for second in range(100)])

    with held(run_dir):
        first, second = load(run_dir).findings

    assert (first.rule, first.file, first.line, first.active) == ("sync-every-step", "train.py", 88, True)
    assert first.lost_seconds == pytest.approx(99 * 720 / 3600)
    assert (second.rule, second.active) == ("gc-pauses", False)
    assert second.lost_seconds == pytest.approx(49 * 36 / 3600)
    came = [event for event in load(run_dir).events if event.what.startswith("finding_")]
    assert [(event.what, event.fields["rule"]) for event in came][-1] == ("finding_went", "gc-pauses")


@pytest.mark.parametrize("kept", ["telemetry.sqlite", "findings.jsonl", "both"])
def test_of_a_run_that_is_over_what_stood_to_its_end_is_the_same_in_every_file(run_dir: Path, kept: str) -> None:
    """Where only one of them is left, it says what both would. What a run before it left standing is not this one's."""
    lines = replace(GC, rule="logging-stall")
    begin(run_dir, run_id="before")
    file = FindingsFile(run_dir / "findings.jsonl")
    earlier = [state(second, run_id="before", findings=(lines,)) for second in range(1, 20)]
    keep(run_dir, [replace(each, taken_wall_ns=each.taken_wall_ns - 100 * 10**9) for each in earlier])
    file.tell((lines,), WALL_S - 81)
    begin(run_dir)
    for second in range(1, 100):
        file.tell((SYNC, GC) if second < 20 else (SYNC,), WALL_S + second)
    keep(run_dir, [state(second, findings=(SYNC, GC) if second < 20 else (SYNC,)) for second in range(1, 100)])
    end(run_dir, 100)
    for name in {"telemetry.sqlite", "findings.jsonl"} - {kept}:
        if kept != "both":
            (run_dir / name).unlink()

    view = load(run_dir)

    assert view.status is Status.FINISHED
    assert {(found.rule, found.active) for found in view.findings} == {
        ("sync-every-step", True),
        ("gc-pauses", False),
        ("logging-stall", False),
    }


# -- attempts


def test_a_restart_has_two_attempts_and_one_cause(run_dir: Path) -> None:
    begin(run_dir)
    keep(
        run_dir,
        [
            *(state(second) for second in range(1, 40)),
            *(state(second, attempt=1, restarts={"segfault": 1}) for second in range(45, 90)),
        ],
    )
    with open(run_dir / "events.jsonl", "a") as history:
        history.write(line("rank_ended", 40, seen_s=1039.9, rank=1, signal=11, attempt=0))
        history.write(line("phase", 41, phase="clearing", attempt=0))
        history.write(line("phase", 42, phase="starting", attempt=1))
        history.write(line("started", 44, attempt=1))
    first = {"rank": 1, "kind": "segfault", "headline": "rank 1 died", "why": "it was first", "advice": "look"}
    write(run_dir, "attempts/0/failure.json", {"version": 1, "first": first, "attempt": 0})

    with held(run_dir):
        view = load(run_dir)

    assert [(attempt.number, attempt.status) for attempt in view.attempts] == [(0, Status.FAILED), (1, Status.RUNNING)]
    failed = view.attempts[0]
    assert (failed.began_s, failed.ended_s) == (WALL_S - 9, WALL_S + 41)
    assert failed.cause is not None
    assert (failed.cause.rank, failed.cause.kind, failed.cause.headline) == (1, "segfault", "rank 1 died")
    assert failed.cause.report == str(run_dir / "attempts/0/failure.json")
    assert view.restarts == {"segfault": 1}
    assert view.attempt == 1
    (ended,) = (event for event in view.events if event.what == "rank_ended")
    assert ended.at_s == WALL_S + 40
    assert ended.fields == {"rank": 1, "signal": 11, "attempt": 0}, "what the node's own clock showed says nothing"


def test_two_runs_in_one_directory_are_one_history_and_two_accounts(run_dir: Path) -> None:
    """The second goes on where the first stopped: its totals are its own, and so are the numbers of its attempts."""
    whole(run_dir)
    with open(run_dir / "events.jsonl", "a") as history:
        history.write(line("run_started", 200, run_id="bbbb", pid=os.getpid()))
        history.write(line("phase", 201, phase="starting", attempt=0))
        history.write(line("started", 202, attempt=0))
    write(run_dir, "group.json", {"version": 1, "run_id": "bbbb", "attempt": 1, "world_size": 2})
    keep(
        run_dir,
        [
            replace(
                each,
                taken_monotonic_ns=each.taken_monotonic_ns + 2 * 10**11,
                taken_wall_ns=each.taken_wall_ns + 2 * 10**11,
            )
            for each in (state(second, run_id="bbbb") for second in range(3, 50))
        ],
    )

    with held(run_dir):
        view = load(run_dir)

    assert (view.run_id, view.status, view.steps) == ("bbbb", Status.RUNNING, 490)
    assert [(each.name, each.number, each.place, each.status) for each in view.attempts] == [
        ("attempts/0", 0, 0, Status.FINISHED),
        ("attempt 0", 0, 1, Status.RUNNING),
    ]
    assert view.attempt == 0, "as its events say"
    assert view.times_s[0] > WALL_S + 200, "no curve, and no mean over one, has what the first run did"
    assert None in view.steps_per_second  # and they say nothing of the time before its ranks
    assert view.goodput_ratio is not None


def test_what_was_lost_is_not_known_where_an_attempt_went_on_by_itself(run_dir: Path) -> None:
    begin(run_dir)
    keep(run_dir, [state(second) for second in range(1, 40)])
    with open(run_dir / "events.jsonl", "a") as history:
        history.write(line("phase", 42, phase="starting", attempt=1))
        history.write(line("lost_work_unknown", 46, attempt=1))
    with held(run_dir):
        views = [load(run_dir), view_of_state(state(50, attempt=1), run_dir=run_dir)]

    for view in (*views, from_json(to_json(views[0]))):
        assert view.goodput_seconds["lost_work"] is None
        assert view.goodput_seconds["productive"]
        assert view.goodput_at_most

    end(run_dir, 100, attempt=1)
    assert load(run_dir).goodput_seconds["lost_work"] == 0.0, "the agent has the last word"


def test_a_checkpoint_that_was_gone_on_from_is_one_that_is_known_of(run_dir: Path) -> None:
    """The program's own: no rank tells of it."""
    begin(run_dir)
    with open(run_dir / "events.jsonl", "a") as history:
        history.write(line("resuming", 1, path="ckpt_40.pt", step=40))
    with held(run_dir):
        view = load(run_dir)
    assert (view.resumed_step, view.checkpoint_step) == (40, 40)

    with open(run_dir / "events.jsonl", "a") as history:
        history.write(line("run_ended", 100, exit_code=1, resumed_step=40, checkpoint_step=90))
    view = load(run_dir)
    assert (view.resumed_step, view.checkpoint_step) == (40, 90)


# -- how it stands


def test_a_run_whose_agent_lives_goes_on_however_long_it_is_silent(run_dir: Path) -> None:
    begin(run_dir)
    with held(run_dir):
        assert load(run_dir, now_s=NOW_S + 86_400).status is Status.RUNNING


STANDSTILL = {"why": "rank 1 is in data.py:31 sleep()", "ranks": [1], "quiet_s": 40.0, "due_in_s": 560.0}


@pytest.mark.parametrize(
    ("then", "stall"),
    [
        ([], (-10.0, 590.0)),
        ([("hang_suspected", 70, {**STANDSTILL, "quiet_s": 80.0, "due_in_s": None, "again": True})], (-10.0, None)),
        ([("hang_over", 70, {"ranks": [1], "after_s": 80.0})], None),
        ([("phase", 70, {"phase": "stopping", "attempt": 0})], None),
    ],
)
def test_a_standstill_is_told_until_it_is_over(
    run_dir: Path, then: list[tuple[str, float, dict[str, Any]]], stall: tuple[float, float | None] | None
) -> None:
    begin(run_dir)
    with open(run_dir / "events.jsonl", "a") as history:
        for what, at_s, fields in [("hang_suspected", 30.0, STANDSTILL), *then]:
            history.write(line(what, at_s, **fields))

    with held(run_dir):
        view = load(run_dir, now_s=WALL_S + 71)

    told = view.stall
    assert (told and (told.since_s - WALL_S, told.due_s and told.due_s - WALL_S)) == stall
    assert view.hang_suspicions == 1
    assert told is None or told.what == STANDSTILL["why"]


def test_a_run_whose_agent_is_gone_without_a_word_is_lost(run_dir: Path) -> None:
    begin(run_dir, pid=2**22 + 1)
    keep(run_dir, [state(second) for second in range(1, 20)])

    view = load(run_dir)

    assert view.status is Status.LOST
    assert view.attempts[0].status is Status.LOST
    assert any("gone and has not said how it ended" in note for note in view.notes)


def test_a_run_that_failed_says_why(run_dir: Path) -> None:
    begin(run_dir)
    end(run_dir, 5, code=1)

    view = load(run_dir)

    assert (view.status, view.exit_code, view.error) == (Status.FAILED, 1, "it broke")


@pytest.mark.parametrize(
    ("signals", "preempted", "code", "stopped_by"),
    [
        (["SIGINT"], False, 130, "SIGINT"),
        (["SIGINT", "SIGTERM"], False, 130, "SIGINT"),  # the second one ends it at once
        (["SIGTERM"], False, 143, "SIGTERM"),
        (["SIGUSR1"], True, 75, "SIGUSR1"),  # it has saved
        (["SIGTERM"], True, 143, "SIGTERM"),  # it could not
        ([], True, 143, ""),  # another node was told
    ],
)
def test_a_run_that_was_told_to_end_was_stopped(
    run_dir: Path, signals: list[str], preempted: bool, code: int, stopped_by: str
) -> None:
    begin(run_dir)
    end(run_dir, 90, code=code, signals=signals, preempted=preempted)

    view = load(run_dir)

    assert (view.status, view.stopped_by, view.exit_code) == (Status.STOPPED, stopped_by, code)
    assert [attempt.status for attempt in view.attempts] == [Status.STOPPED]


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([], 130),  # a program that ends with this code
        ([], 75),  # a card that fell off the bus
        (["SIGINT"], 1),  # it had failed already when somebody lost patience
        (["an odd name"], 137),
    ],
)
def test_a_run_that_failed_was_not_stopped(run_dir: Path, signals: list[str], code: int) -> None:
    begin(run_dir)
    end(run_dir, 90, code=code, signals=signals)

    view = load(run_dir)

    assert (view.status, view.stopped_by) == (Status.FAILED, "")
    assert [attempt.status for attempt in view.attempts] == [Status.FAILED]


# -- what is missing


def test_a_run_that_nobody_watched_has_what_its_agent_wrote(run_dir: Path) -> None:
    begin(run_dir)
    end(run_dir, 100)
    ranks = {
        "0": {"steps": 7, "samples": 70, "step_seconds": 1.5, "phase_seconds": {"forward": 1.5}, "max_rss_bytes": 5}
    }
    write(run_dir, "summary.json", {"version": 1, "exit_code": 0, "ranks": ranks})

    view = load(run_dir)

    assert (view.watched, view.steps, view.times_s, view.steps_per_second) == (False, 7, (), ())
    assert view.ranks[0].phase_seconds["forward"] == 1.5
    assert any("telemetry.sqlite is missing" in note for note in view.notes)


DAMAGES = {
    "job.json": b"{",
    "events.jsonl": b"\x00\xff\n[1, 2]\n{}\n",
    "group.json": b"[]",
    "summary.json": b"\xff",
    "telemetry.sqlite": b"This is no database." * 50,
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("how", ["damaged", "missing", "empty", "a directory", "a pipe"])
def test_one_file_that_is_not_as_it_should_be_costs_what_is_in_it_and_no_more(
    run_dir: Path, name: str, how: str
) -> None:
    whole(run_dir, 20)
    path = run_dir / name
    path.unlink()
    match how:
        case "damaged":
            path.write_bytes(DAMAGES[name])
        case "empty":
            path.write_bytes(b"")
        case "a directory":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
        case _:
            pass

    view = load(run_dir)

    said = " ".join(view.notes)
    assert (name in said) or (how == "missing" and name in ("group.json", "summary.json"))
    if name != "telemetry.sqlite":
        assert view.steps == 190
        assert len(view.steps_per_second) > 10
    if name != "events.jsonl":
        assert view.status is Status.FINISHED
    assert view.name in ("demo", "run")


def test_a_directory_of_nothing_and_no_directory(tmp_path: Path) -> None:
    assert load(tmp_path).status is Status.UNKNOWN
    assert load(tmp_path / "nowhere").notes[0].startswith("cannot read ")


def test_a_damaged_report_of_a_failure_is_told(run_dir: Path) -> None:
    whole(run_dir, 20)
    (run_dir / "attempts/0/failure.json").write_text('{"first": 3}')

    assert any("attempts/0/failure.json is damaged" in note for note in load(run_dir).notes)


@pytest.mark.parametrize(
    ("inside", "told"),
    [
        ("node-1", "node-1/findings.jsonl cannot be read: Permission denied"),
        ("attempts/0", "attempts/0/failure.json cannot be read: the reason of that failure is unknown"),
        (".", "telemetry.sqlite cannot be read: Permission denied"),
    ],
)
def test_a_directory_that_is_closed_to_us_costs_what_is_in_it_and_no_more(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, inside: str, told: str
) -> None:
    whole(run_dir, 20)
    (run_dir / "node-1").mkdir()
    closed(run_dir / inside, monkeypatch)

    view = load(run_dir)

    assert told in view.notes
    assert (view.status is Status.FINISHED) == (inside != ".")


@pytest.mark.parametrize("number", ["1e999", "NaN", "1" + "0" * 400])
def test_a_number_that_json_allows_and_nobody_can_compute_with_is_not_known(run_dir: Path, number: str) -> None:
    whole(run_dir, 20)
    with contextlib.closing(sqlite3.connect(run_dir / "telemetry.sqlite", isolation_level=None)) as connection:
        (data,) = connection.execute("SELECT data FROM document").fetchone()
        document = json.loads(zlib.decompress(data))
        for row in [*document["counters"], *document["gauges"]]:
            row[2] = "?"
        text = json.dumps(document).replace('"?"', number)
        connection.execute("UPDATE document SET data = ?", (zlib.compress(text.encode()),))
        connection.execute("DELETE FROM frame WHERE level = 0")  # what was seen last is in the document alone
    with open(run_dir / "events.jsonl", "a") as history:
        history.write(line("run_ended", 21, exit_code=0, restarts={"failure": "?"}).replace('"?"', number))

    view = load(run_dir)
    assert (view.status, view.world_size, view.steps, view.restarts) == (Status.FINISHED, 2, 0, {})

    (run_dir / "events.jsonl").unlink()
    (run_dir / "summary.json").write_text(f'{{"exit_code": 0, "elapsed_s": {number}}}')
    assert load(run_dir).elapsed_seconds is None


@pytest.mark.parametrize("digits", [10, 310, 5000])
def test_a_rank_that_no_job_could_have_is_none(run_dir: Path, digits: int) -> None:
    begin(run_dir)
    end(run_dir, 5)
    ranks = {"0": {"steps": 5}, "9" * digits: {"steps": 7}}
    write(run_dir, "summary.json", {"version": 1, "exit_code": 0, "ranks": ranks})

    assert [rank.rank for rank in load(run_dir).ranks] == [0]


@pytest.mark.parametrize("how", ["damaged", "of another version", "a pipe"])
def test_findings_that_cannot_be_read_are_told_and_those_of_the_telemetry_are_there(run_dir: Path, how: str) -> None:
    whole(run_dir, 20, findings=(SYNC,))
    path = run_dir / "findings.jsonl"
    match how:
        case "damaged":
            path.write_text('{"version": 1, "rule"')
        case "of another version":
            path.write_text('{"version": 2}')
        case _:
            os.mkfifo(path)

    view = load(run_dir)

    assert [found.rule for found in view.findings] == ["sync-every-step"]
    assert [note for note in view.notes if "findings.jsonl" in note]


def test_a_killed_sidecar_leaves_a_log_that_is_read_too(run_dir: Path, tmp_path: Path) -> None:
    """A copy of the files while they are written is what a kill leaves."""
    begin(run_dir)
    announce(tmp_path / "channel", run_dir)
    keeper = TelemetryWriter(tmp_path / "channel")
    for second in range(1, 30):
        keeper.write_now(state(second))
    shutil.copytree(run_dir, tmp_path / "copy")
    keeper.write_now(None, last=True)

    view = load(tmp_path / "copy")

    assert view.steps == 290
    assert view.watched


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run, to be spoiled."""
    run_dir = whole(tmp_path_factory.mktemp("good") / "run", 40, gpu=True, findings=(SYNC,))
    write(run_dir, "attempts/0/failure.json", {"version": 1, "first": {"rank": 1, "kind": "x"}, "attempt": 0})
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


TABLES = ("run", "series", "frame", "document", "finding", "event", "failure", "meta")
JUNK = (None, "x", b"\x00\xff", -1, 1e300, '{"a":[1]}', "[]", 10**15)


@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_any_value_in_any_column_and_any_bytes_anywhere_still_give_a_view(
    good: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run_dir = tmp_path_factory.mktemp("spoiled")
    for name, content in good.items():
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_bytes(content)
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(good)))
        spoiled = bytearray(good[name])
        for _ in range(data.draw(st.integers(1, 30))):
            spoiled[data.draw(st.integers(0, len(spoiled) - 1))] = data.draw(st.integers(0, 255))
        (run_dir / name).write_bytes(spoiled)
    else:
        connection = sqlite3.connect(run_dir / "telemetry.sqlite", isolation_level=None)
        table = data.draw(st.sampled_from(TABLES))
        column = data.draw(st.sampled_from([row[1] for row in connection.execute(f"PRAGMA table_info({table})")]))
        with contextlib.suppress(sqlite3.Error):
            connection.execute(f"UPDATE {table} SET {column} = ?", (data.draw(st.sampled_from(JUNK)),))
        connection.close()

    load(run_dir)
    list(rows_of(run_dir, notes=[]))
    shutil.rmtree(run_dir)


# -- how long it was


def test_how_long_a_run_was_is_what_its_launcher_has_summed_up(run_dir: Path) -> None:
    """Also where its clock was set on by an hour, and where its history is gone."""
    begin(run_dir)
    told: dict[str, float | None] = {**PRODUCTIVE, "productive": 60.0, "lost_work": None}
    end(run_dir, 3660, goodput=told)
    write(run_dir, "summary.json", {"version": 1, "run_id": "aaaa", "exit_code": 0, "elapsed_s": 70.0})

    view = load(run_dir)

    assert (view.elapsed_seconds, view.goodput_ratio) == (70.0, pytest.approx(6 / 7))
    (run_dir / "events.jsonl").unlink()
    assert load(run_dir).elapsed_seconds == 70.0


def set_on(run_dir: Path, by_s: float, *, since: str) -> None:
    """The clock of the wall was set on by so much, before the first event `since`."""
    events = [json.loads(text) for text in (run_dir / "events.jsonl").read_text().splitlines()]
    for event in events[[event["event"] for event in events].index(since) :]:
        event["time_s"] += by_s
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_makes_a_run_no_longer(run_dir: Path, by_s: float) -> None:
    """One that has not summed up, whether it has said that it ended or not; and one that goes on."""
    begin(run_dir)
    end(run_dir, 60)
    (run_dir / "summary.json").unlink()
    set_on(run_dir, by_s, since="started")
    assert load(run_dir).elapsed_seconds == pytest.approx(70.0)

    lines = (run_dir / "events.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "events.jsonl").write_text("".join(line for line in lines if "run_ended" not in line))
    with held(run_dir):
        assert load(run_dir, now_s=WALL_S + 100 + by_s).elapsed_seconds == pytest.approx(110.0)

    os.utime(run_dir / "events.jsonl", (WALL_S + 60 + by_s,) * 2)
    assert load(run_dir).elapsed_seconds == pytest.approx(70.0)
    keep(run_dir, [state(second) for second in range(60, 90)])  # its time is not set on: it never jumps
    os.utime(run_dir / "events.jsonl", (WALL_S + 60 + by_s,) * 2)
    assert load(run_dir).elapsed_seconds == pytest.approx(99.0)


def test_where_the_history_is_of_an_older_gpulaunch_the_time_on_the_wall_is_all_there_is(run_dir: Path) -> None:
    begin(run_dir)
    end(run_dir, 60)
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    without = [{name: value for name, value in line.items() if name != "monotonic_s"} for line in lines]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in without))

    assert load(run_dir).elapsed_seconds == 70.0


# -- several nodes, many ranks


def test_two_nodes_that_share_a_directory_are_one_run(run_dir: Path) -> None:
    begin(run_dir)
    keep(run_dir, [state(second, ranks=(0, 1), gpu=True) for second in range(1, 30)])
    keep(
        run_dir / "node-1",
        [state(second, ranks=(2, 3), node=1, findings=(SYNC,)) for second in range(1, 30)],
        channel="channel-1",
    )

    view = load(run_dir)

    assert [(rank.rank, rank.node) for rank in view.ranks] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [node.node for node in view.nodes] == [0, 1]
    assert view.samples_per_second_now == pytest.approx(4 * 320.0)
    assert [finding.node for finding in view.findings] == [1]


def test_many_ranks_have_coarser_curves_and_a_bounded_document(run_dir: Path) -> None:
    begin(run_dir)
    keep(run_dir, [state(second, ranks=range(256)) for second in range(1, 60, 8)])

    view = load(run_dir)

    assert len(view.ranks) == 256
    assert len([rank for rank in view.ranks if rank.steps_per_second]) == 128
    assert all(rank.steps for rank in view.ranks)
    assert any("curves of 128 of 256 ranks" in note for note in view.notes)
    assert len(json.dumps(to_json(view))) < 4 << 20


def test_a_run_that_started_nothing_has_no_attempt_and_no_directory() -> None:
    """It was refused before its ranks; the one after it has the first directory."""
    told: list[tuple[str, dict[str, object]]] = [
        *(("run_started", {"run_id": "refused"}), ("phase", {"phase": "clearing", "attempt": 0})),
        *(("phase", {"phase": "done", "attempt": 0}), ("run_ended", {"exit_code": 2})),
        *(("run_started", {"run_id": "newest"}), ("phase", {"phase": "starting", "attempt": 0})),
        *(("started", {"attempt": 0}), ("phase", {"phase": "done", "attempt": 0}), ("run_ended", {"exit_code": 1})),
    ]
    lines = [{"event": what, "time_s": 10.0 + at, **fields} for at, (what, fields) in enumerate(told)]

    (attempt,) = history_of(lines, {}, [0]).views({}, Status.FAILED)

    assert (attempt.number, attempt.place, attempt.earlier, attempt.name) == (0, 0, False, "attempt 0")
