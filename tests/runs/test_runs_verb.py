"""`gpulaunch runs`: what is listed, what is removed, and what never is."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.exporters.files.flame_svg import flame_svg
from gpulaunch.launcher.cli import main as entry
from gpulaunch.launcher.runs.stored import Run, State, removable, stored

DAY_S = 86400.0


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpulaunch-runs").mkdir()
    return tmp_path / "gpulaunch-runs"


def a_run(
    here: Path,
    name: str,
    *,
    days: float = 0.0,
    code: int | None = 0,
    stopped_by: str | None = None,
    checkpoints: bool = False,
) -> Path:
    """What a run leaves; `code` None: it was killed."""
    run = here / name
    rank = run / "attempts" / "3" / "rank-0"
    rank.mkdir(parents=True)
    (run / "attempts" / "2").mkdir()
    (rank / "stdout.log").write_bytes(b"x" * 5000)
    (run / "job.json").write_text(json.dumps({"version": 1, "gpulaunch_pid": 1}))
    for file in ("group.json", "telemetry.sqlite", "events.jsonl"):
        (run / file).write_text("{}")
    if code is not None:
        summary = {"version": 1, "exit_code": code, "stopped_by": stopped_by, "ranks": {}}
        (run / "summary.json").write_text(json.dumps(summary))
    (run / "checkpoints").mkdir()
    if checkpoints:
        (run / "checkpoints" / "step-5.pt").write_bytes(b"y" * 100_000)
    at_s = time.time() - days * DAY_S
    for path in (*run.rglob("*"), run):
        os.utime(path, (at_s, at_s))
    return run


def runs(*words: str) -> int:
    return entry.main(["runs", *words])


def test_runs_are_listed_with_state_size_and_age(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(here, "good", days=3)
    a_run(here, "bad", days=2, code=1, checkpoints=True)
    a_run(here, "gone", days=1, code=None)
    a_run(here, "ended", days=0.5, code=130, stopped_by="SIGINT")
    (here / "notes").mkdir()
    (here / "link").symlink_to(here / "good")

    assert runs() == 0

    printed = capsys.readouterr()
    assert "--job-dir, specify the directory" in printed.err
    head, ended, gone, bad, good, total = printed.out.splitlines()
    assert head.split() == ["RUN", "STATE", "AGE", "SIZE", "FILES", "CHECKPOINTS"]
    assert [line.split()[:2] for line in (ended, gone, bad, good)] == [
        ["ended", "stopped"],
        ["gone", "lost"],
        ["bad", "failed"],
        ["good", "finished"],
    ]
    assert "3 d 00 h" in good
    assert bad.split()[-2:] == ["100", "KiB"]
    assert total.startswith("4 runs, ")
    assert runs("--json") == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [(row["state"], row["checkpoint_bytes"] > 90_000) for row in rows][2] == ("failed", True)


def test_what_real_runs_have_left_is_listed_and_all_of_it_but_checkpoints_removed(
    gpulaunch: Any, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the profiler's files, of one that ended well and of two that failed."""
    saves = 'mkdir -p "$GPULAUNCH_CHECKPOINT_DIR"; echo x > "$GPULAUNCH_CHECKPOINT_DIR/step-5.pt"; exit 3'
    seen = 'for i in $(seq 300); do [ -e "$GPULAUNCH_RUN_DIR/telemetry.sqlite" ] && exit 0; sleep 0.1; done; exit 9'
    made = [("saved", ["sh", "-c", saves], 3), ("bad", ["false"], 1), ("good", ["sh", "-c", seen], 0)]
    for name, command, code in made:
        ended = gpulaunch("--name", name, "--nproc", "2", "--no-python", *command)
        assert ended.code == code, ended
    good, bad, saved = (next(here.glob(f"{name}-*")).name for name in ("good", "bad", "saved"))

    assert runs("--json") == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [(Path(row["path"]).name, row["state"], row["checkpoint_bytes"] > 0) for row in rows] == [
        (good, "finished", False),
        (bad, "failed", False),
        (saved, "failed", True),
    ]
    assert runs("prune", "--keep", "1") == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(" (failed ")[0] for line in told] == [f"removed {bad}", f"removed {saved}", told[-1]]
    assert told[-1].startswith("2 of 3 runs removed, ")
    assert sorted(path.name for path in here.iterdir()) == [good, saved]
    left = {str(path.relative_to(here / saved)) for path in (here / saved).rglob("*") if path.is_file()}
    assert left == {"job.json", "summary.json", "checkpoints/step-5.pt"}

    assert runs("prune", "--keep", "0", "--checkpoints") == 0
    assert list(here.iterdir()) == []


def test_one_run_is_one_and_its_directory_is_written_plainly(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(here, "run")
    monkeypatch.chdir(here)

    assert runs(".") == 0
    total = capsys.readouterr().out.splitlines()[-1]
    assert total.startswith("1 run, ")
    assert total.endswith(f" in {here}")
    assert runs(".", "--json") == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["path"] == str(here / "run")
    assert runs("prune", ".", "--keep", "1") == 0
    assert capsys.readouterr().out.startswith("0 of 1 run removed, ")


def test_no_runs_are_no_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here.rmdir()

    assert runs() == 0
    told = capsys.readouterr().out
    assert told.startswith("no runs in ")
    assert "--job-dir, specify the directory" in told

    here.parent.rmdir()  # the current directory
    assert runs() == 0
    assert capsys.readouterr().out.startswith("no runs in ")


def test_a_run_that_goes_on_is_never_removed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The agent is known by the directory that it holds open; another machine's by its lock alone."""
    mine, locked = a_run(here, "mine", days=9), a_run(here, "locked", days=9)
    (mine / "job.json").write_text(json.dumps({"gpulaunch_pid": os.getpid()}))
    os.utime(mine / "job.json", (0, 0))
    fd, other = os.open(mine, os.O_RDONLY), os.open(locked, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        assert runs() == 0
        assert "running" in capsys.readouterr().out
        assert runs("prune", "--keep", "0") == 0
    finally:
        os.close(fd)
        os.close(other)

    assert sorted(path.name for path in here.iterdir()) == ["locked", "mine"]
    assert (locked / "attempts" / "3" / "rank-0" / "stdout.log").exists()
    assert "locked stays: it is in use" in capsys.readouterr().err


def test_what_is_removed_is_said_and_counted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for day in range(5):
        a_run(here, f"run-{day}", days=day, code=day % 2)

    assert runs("prune", "--keep", "2", "--dry-run") == 0
    said = capsys.readouterr().out
    assert [line.split()[2] for line in said.splitlines()[:-1]] == ["run-2", "run-3", "run-4"]
    assert len(list(here.iterdir())) == 5

    assert runs("prune", "--keep", "2", "--older", "3d") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines[:-1]] == [
        "removed run-3 (failed 3 d 00 h ago",
        "removed run-4 (finished 4 d 00 h ago",
    ]
    assert lines[-1].startswith("2 of 5 runs removed, ")
    assert sorted(path.name for path in here.iterdir()) == ["run-0", "run-1", "run-2"]


def test_checkpoints_stay_unless_asked_and_what_goes_on_from_them_too(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(here, "run", days=3, checkpoints=True)

    assert runs("prune", "--keep", "0") == 0
    assert "its checkpoints stay" in capsys.readouterr().out
    assert (run / "checkpoints" / "step-5.pt").stat().st_size == 100_000
    left = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.name != "step-5.pt")
    assert left == ["attempts", "attempts/3", "checkpoints", "job.json", "summary.json"]
    assert [each.name for each in stored(str(here))] == ["run"], "and is still known as a run"

    assert runs("prune", "--keep", "0", "--checkpoints") == 0
    assert not run.exists()


def test_a_run_of_which_only_checkpoints_are_left_keeps_its_age_and_is_not_removed_again(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(here, "run", days=3, checkpoints=True)
    (run / "traces").mkdir()
    (run / "traces" / "theirs.json").touch()
    os.utime(run / "traces" / "theirs.json", (0, 0))
    assert runs("prune", "--older", "2d") == 0
    capsys.readouterr()

    assert runs("prune", "--older", "2d") == 0
    assert capsys.readouterr().out.startswith("0 of 1 run removed, ")
    (found,) = stored(str(here))
    assert time.time() - found.changed_s == pytest.approx(3 * DAY_S, abs=60)

    (run / "events.jsonl").write_text("{}")  # it has gone on since
    os.utime(run / "events.jsonl", (0, 0))
    assert runs("prune", "--older", "2d") == 0
    assert capsys.readouterr().out.startswith("removed run ")
    assert not (run / "events.jsonl").exists()

    assert runs("prune", "--older", "2d", "--checkpoints") == 0
    assert [path.name for path in run.iterdir()] == ["traces"]


def test_what_gpulaunch_has_not_made_stays(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(here, "run", days=3)
    (run / "model.pt").write_text("mine")
    elsewhere = here.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "keep").write_text("mine too")
    (run / "flame").symlink_to(elsewhere)
    (run / "attempts" / "link").symlink_to(elsewhere)
    other = here / "not-a-run"
    other.mkdir()
    (other / "job.json").write_text("{}")

    assert runs("prune", "--keep", "0") == 0

    assert "did not create it: flame, model.pt" in capsys.readouterr().out
    assert sorted(path.name for path in run.iterdir()) == ["flame", "model.pt"]
    assert (elsewhere / "keep").read_text() == "mine too"
    assert other.exists()


MARKED = '<!DOCTYPE html><meta name="generator" content="gpulaunch">'


def test_a_programs_own_files_under_our_names_stay(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--job-dir out/exp1`, into which the program writes as well: its torch profiler into traces/, a report of its."""
    run = a_run(here, "run", days=3)
    theirs = {
        "traces/node7.1234.pt.trace.json": "{}",
        "traces/20260101-000000/notes.txt": "",
        "traces/mine/rank-0.json": "{}",
        "flame/loader.svg": "<svg>",
        "report.html": "<html>my report",
        "summary.json": '{"accuracy": 0.9}',
    }
    ours = {
        "traces/last": "1",
        "traces/20260101-000000/rank-0.json": "{}",
        "traces/20260101-000000/trace.json": "{}",
        "traces/20260202-000000/rank-12.json": "{}",
        "flame/forward.svg": flame_svg([], title="", note=""),
        "flame/stacks.speedscope.json": "{}",
    }
    for name, content in (theirs | ours).items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(content)
    for path in run.rglob("*"):
        os.utime(path, (0, 0))

    assert runs("prune", "--keep", "0") == 0

    assert {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()} == set(theirs)
    assert (
        "kept, because gpulaunch did not create it: flame, report.html, summary.json, traces" in capsys.readouterr().out
    )

    other = a_run(here, "other", days=3)
    (other / "report.html").write_text(MARKED)
    os.utime(other / "report.html", (0, 0))
    assert runs("prune", "--keep", "0") == 0
    assert not other.exists()


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """By another process, as far as flock can tell."""
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_checkpoints_into_which_another_run_saves_stay(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--checkpoint-dir gpulaunch-runs/run/checkpoints` of a later run that goes on."""
    run = a_run(here, "run", days=3, checkpoints=True)
    (run / "checkpoints" / "sweep").mkdir()
    owner = run / "checkpoints" / "sweep" / ".owner"
    owner.touch()
    for path in (*run.rglob("*"), run):
        os.utime(path, (0, 0))
    with locked(owner):
        assert runs("prune", "--keep", "0", "--checkpoints") == 0
    assert "KiB): another run saves there" in capsys.readouterr().out
    assert (run / "checkpoints" / "step-5.pt").exists()

    with locked(owner):
        assert runs("prune", "--keep", "0", "--checkpoints") == 0
    assert "run stays: another run saves there" in capsys.readouterr().err

    assert runs("prune", "--keep", "0", "--checkpoints") == 0
    assert not run.exists()


@pytest.mark.parametrize(("after_s", "state"), [(0.0, State.FINISHED), (7200.0, State.LOST)])
def test_a_job_whose_first_node_has_left_goes_on_where_another_one_writes(
    here: Path, after_s: float, state: State
) -> None:
    """On a machine that is not seen from here: it is not removed within a day."""
    run = a_run(here, "run", days=0.2, code=75, stopped_by="SIGTERM")
    a_run(run, "node-1", days=0.2, code=0 if state is State.FINISHED else None)
    os.utime(run, (run / "job.json").stat()[7:9])
    at_s = (run / "summary.json").stat().st_mtime + 1.0
    for name in ("summary.json", "telemetry.sqlite") if state is State.FINISHED else ("telemetry.sqlite",):
        os.utime(run / "node-1" / name, (at_s + after_s, at_s + after_s))

    (found,) = stored(str(here))

    assert found.state is state
    assert bool(removable([found], now_s=time.time(), keep=0, older_s=None)) == (state is State.FINISHED)


def test_a_summary_of_an_earlier_run_in_the_directory_says_nothing(here: Path) -> None:
    """The later one was killed, or runs on another machine: lost, and so not removed within a day."""
    run = a_run(here, "run", days=0.1)
    os.utime(run / "job.json")

    (found,) = stored(str(here))

    assert found.state is State.LOST
    assert removable([found], now_s=time.time(), keep=0, older_s=None) == []


def test_checkpoints_behind_a_link_stay(here: Path) -> None:
    run = a_run(here, "run", days=3)
    (run / "checkpoints").rmdir()
    store = here.parent / "store"
    store.mkdir()
    (store / "step-1.pt").write_text("1")
    (run / "checkpoints").symlink_to(store)

    assert runs("prune", "--keep", "0", "--checkpoints") == 0
    assert (store / "step-1.pt").exists()


@pytest.mark.root
def test_another_users_runs_are_not_ours(here: Path) -> None:
    run = a_run(here, "run", days=3)
    os.chown(run, 65534, 65534)

    assert stored(str(here)) == []


@given(
    st.lists(st.tuples(st.sampled_from(State), st.floats(0, 50 * DAY_S)), max_size=30),
    st.none() | st.integers(0, 30),
    st.none() | st.floats(0, 40 * DAY_S),
)
def test_only_what_is_over_old_and_not_among_the_newest_is_chosen(
    ages: list[tuple[State, float]], keep: int | None, older_s: float | None
) -> None:
    now_s = 1e9
    all_runs = [
        Run(
            path=f"/{at}",
            state=state,
            began_s=-at,
            changed_s=now_s - age,
            size_bytes=1,
            checkpoint_bytes=0,
            num_files=1,
        )
        for at, (state, age) in enumerate(ages)
    ]
    going = removable(all_runs, now_s=now_s, keep=keep, older_s=older_s)

    assert not {run.path for run in all_runs[: keep or 0]} & {run.path for run in going}
    for run in going:
        assert run.state is not State.RUNNING
        assert now_s - run.changed_s >= (older_s or 0) - 1e-3
        assert run.state is not State.LOST or now_s - run.changed_s >= DAY_S - 1e-3


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["prune"], "runs prune: --keep N, --older TIME, or both are required"),
        (["--keep", "3"], "runs: --keep, --older, --checkpoints and --dry-run are for `gpulaunch runs prune`"),
        (["prune", "--older", "soon"], "runs: argument --older: expected a time such as"),
        (["prune", "--keep", "-1"], "runs: argument --keep: expected"),
        (["a", "b"], "runs: one directory at a time, not 2: a b"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs(*words) == 2

    said = capsys.readouterr()
    assert said.err.startswith(f"gpulaunch: error: {line}")
    assert said.out == ""
