"""Run files with values that no program of ours writes: every verb says a sentence, and shows the rest."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs_on_disk import whole

from gpulaunch.launcher.cli.main import INTERNAL_ERROR, main
from gpulaunch.launcher.runs.processes import RunError, agent_of, read_group

JSON_FILES = ("job.json", "group.json", "summary.json", "hang.json", "attempts/0/failure.json")
DEEP = '{"version": 1, "ranks": ' + "[" * 5000 + "]" * 5000 + "}"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = whole(tmp_path_factory.mktemp("good") / "run", seconds=40)
    (run / "hang.json").write_text('{"version": 1, "attempt": 0, "ranks": [{"rank": 0, "stack": []}]}')
    (run / "attempts/0/failure.json").write_text('{"version": 1, "first_cause": {"rank": 0, "kind": "exception"}}')
    (run / "findings.jsonl").touch()
    return run


@pytest.fixture
def copied(good: Path, tmp_path: Path) -> Callable[[], Path]:
    """A copy of the run, anew at each call."""

    def copy() -> Path:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(good, tmp_path / "run")
        return tmp_path / "run"

    return copy


def shown(run: Path, good: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """What the verbs print; none may fail for a reason of its own."""
    said = ""
    for argv in (
        ["report", run],
        ["top", run, "--once"],
        ["compare", good, run],
        ["export", run, "--out", run.parent / "out"],
        ["flame", run],
        ["trace", run],
    ):
        code = main([str(word) for word in argv])
        out, err = capfd.readouterr()
        assert code != INTERNAL_ERROR, (argv[0], err)
        said += out + err
    return said


def test_frames_of_a_level_that_is_none_are_named_and_the_rest_is_shown(
    good: Path, copied: Callable[[], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    run = copied()
    change(run, "UPDATE frame SET level = -5")

    said = shown(run, good, capfd)

    assert "telemetry.sqlite: rows of no known level are left out" in said
    assert "train.py" in said
    assert "no known level" not in shown(copied(), good, capfd)


def test_no_value_in_any_column_breaks_a_verb(
    good: Path, copied: Callable[[], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    with sqlite3.connect(good / "telemetry.sqlite") as telemetry:
        tables = [name for (name,) in telemetry.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = [(table, row[1]) for table in tables for row in telemetry.execute(f"PRAGMA table_info({table})")]
    assert ("frame", "level") in columns
    for number, (table, column) in enumerate(columns):
        run = copied()
        change(run, f"UPDATE {table} SET {column} = ?", (-5, 1 << 62, "[" * 3000, b"\x00\xff")[number % 4])
        shown(run, good, capfd)


@pytest.mark.parametrize("name", [*JSON_FILES, "events.jsonl", "findings.jsonl"])
def test_a_file_that_is_nested_without_end_is_damaged_like_any_other(
    good: Path, copied: Callable[[], Path], capfd: pytest.CaptureFixture[str], name: str
) -> None:
    run = copied()
    (run / name).write_text(DEEP)

    assert "demo" in shown(run, good, capfd) or name == "job.json"


odd = st.sampled_from([None, True, -5, 1 << 70, -1e300, 1e999, float("nan"), "", "x" * 3000, "\x1b[2J", [], {}, [[[]]]])


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_no_value_in_a_json_file_breaks_a_verb(
    data: st.DataObject, good: Path, copied: Callable[[], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    def changed(value: Any) -> Any:
        if data.draw(st.integers(0, 9)) == 0:
            return data.draw(odd)
        if isinstance(value, dict):
            return {name: changed(each) for name, each in value.items()}
        return [changed(each) for each in value] if isinstance(value, list) else value

    run = copied()
    for name in data.draw(st.sets(st.sampled_from([*JSON_FILES, "events.jsonl"]), min_size=1, max_size=2)):
        lines = (run / name).read_text().splitlines() if name.endswith("l") else [(run / name).read_text()]
        (run / name).write_text("\n".join(json.dumps(changed(json.loads(line))) for line in lines))

    shown(run, good, capfd)


@pytest.mark.parametrize("pid", [-1, 0, 1 << 70, 1e999, "x", None, [], True])
def test_a_group_with_a_pid_that_is_none_signals_nobody(tmp_path: Path, pid: object) -> None:
    group = {"run_id": "r", "attempt": 0, "ranks": [{"rank": 0, "pid": pid}], "agent_pid": pid}
    (tmp_path / "group.json").write_text(json.dumps(group))

    if pid is not True:
        with pytest.raises(RunError, match=r"cannot read .*group\.json"):
            read_group(str(tmp_path))
    assert agent_of(str(tmp_path)) is None


def test_a_group_that_is_nested_without_end_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "group.json").write_text(DEEP)

    with pytest.raises(RunError, match="nested too deeply"):
        read_group(str(tmp_path))


def change(run: Path, statement: str, *values: object) -> None:
    telemetry = sqlite3.connect(run / "telemetry.sqlite")
    with contextlib.suppress(sqlite3.IntegrityError):  # a column that takes no such value, whoever writes it
        telemetry.execute(statement.replace("UPDATE", "UPDATE OR IGNORE", 1), values)
    telemetry.commit()
    telemetry.close()
