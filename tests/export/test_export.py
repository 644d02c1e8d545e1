"""What leaves the house as a file comes back as it was; and the verb that does it."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from pathlib import Path

import pytest
from kept_run import SYNC, WALL_S, line, state
from runs_on_disk import begin, closed, keep, whole, write

from gpulaunch.exporters.files.jsonl import read_jsonl, write_jsonl
from gpulaunch.exporters.files.parquet import read_parquet, write_parquet
from gpulaunch.exporters.files.rows import Row, rows_of
from gpulaunch.exporters.store.reading import TelemetryReader
from gpulaunch.launcher.cli import export
from gpulaunch.launcher.cli.waiting import Activity, bar
from gpulaunch.launcher.job.options import UsageError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return whole(tmp_path / "run", 60, gpu=True, findings=(SYNC,))


def rows(run_dir: Path, step_s: float = 0.0) -> list[Row]:
    notes: list[str] = []
    found = list(rows_of(run_dir, step_s=step_s, notes=notes))
    assert notes == []
    return found


def test_every_number_of_the_file_is_a_row(run_dir: Path) -> None:
    samples = [row for row in rows(run_dir) if row.kind == "sample"]

    with TelemetryReader(run_dir / "telemetry.sqlite") as reader:
        expected = sum(len(part) for frame in reader.frames() for part in reader.values(frame))
    assert len(samples) == expected > 59 * 100
    steps = {row.at_s: row.value for row in samples if row.name == "gpulaunch_steps_total" and row.rank == 1}
    assert steps[WALL_S + 50] == 500.0
    (phase,) = {
        row.labels["phase"] for row in samples if row.name == "gpulaunch_phase_seconds_total" and row.value == 0
    } & {"optimizer"}
    assert phase == "optimizer"
    assert {row.gpu for row in samples if row.name == "gpulaunch_gpu_power_watts"} == {"0"}
    assert {row.run_id for row in samples} == {"aaaa"}


def test_findings_events_and_runs_are_rows_too(run_dir: Path) -> None:
    others = {(row.kind, row.name) for row in rows(run_dir) if row.kind != "sample"}

    assert {("run", "demo"), ("finding", "sync-every-step"), ("event", "run_started")} <= others
    assert ("event", "finding_came") in others


def test_each_failure_has_its_own_time_and_not_that_of_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    begin(run_dir)
    for attempt, failed_s in enumerate((1000, 2000)):
        first = {"kind": "segfault", "headline": "rank 1 was killed"}
        report = {"version": 1, "first": first, "attempt": attempt, "started_wall_s": WALL_S - 10}
        write(run_dir, f"attempts/{attempt}/failure.json", report)
        os.utime(run_dir / f"attempts/{attempt}/failure.json", (WALL_S + failed_s,) * 2)
    keep(run_dir, [state(second) for second in range(1, 5)])

    failures = [row for row in rows(run_dir) if row.kind == "failure"]

    assert [(row.at_s - WALL_S, row.attempt, row.name) for row in failures] == [
        (1000, 0, "segfault"),
        (2000, 1, "segfault"),
    ]


def test_a_finding_is_of_the_run_that_had_it(tmp_path: Path) -> None:
    """In a directory that two runs have used, each may have found the same."""
    run_dir = tmp_path / "run"
    begin(run_dir)
    keep(run_dir, [state(second, findings=(SYNC,)) for second in range(1, 5)])
    keep(run_dir, [state(second, run_id="bbbb", findings=(SYNC,)) for second in range(101, 105)])

    findings = [row for row in rows(run_dir) if row.kind == "finding"]

    assert [(row.at_s - WALL_S, row.run_id) for row in findings] == [(1, "aaaa"), (101, "bbbb")]


def test_coarser_samples_are_fewer_and_end_at_the_same_numbers(run_dir: Path) -> None:
    fine, coarse = rows(run_dir), rows(run_dir, step_s=10.0)

    assert len(coarse) < len(fine) / 2
    newest = [max(row.value or 0 for row in each if row.name == "gpulaunch_steps_total") for each in (fine, coarse)]
    assert newest == [590.0, 590.0]


def test_json_lines_come_back_as_they_were(run_dir: Path) -> None:
    out = io.StringIO()
    every = rows(run_dir)

    assert write_jsonl(every, out) == len(every)
    assert list(read_jsonl(out.getvalue().splitlines())) == every


def test_json_lines_are_json_whatever_an_event_says() -> None:
    out = io.StringIO()
    write_jsonl(
        [Row(kind="event", at_s=1.0, node=0, name="odd\x1b\n\udcff", data={"x": math.nan, "y": [math.inf]})], out
    )

    _, text = out.getvalue().splitlines()
    assert text.isascii()
    assert json.loads(text)["data"] == {"x": None, "y": [None]}


def test_json_lines_of_another_version_are_refused() -> None:
    with pytest.raises(ValueError, match="version 9, this gpulaunch knows 1"):
        list(read_jsonl(['{"kind": "export", "version": 9}']))


def test_parquet_comes_back_as_it_was(run_dir: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra gpulaunch[parquet] is not installed")
    out = io.BytesIO()
    every = rows(run_dir)

    assert write_parquet(every, out) == len(every)
    out.seek(0)
    assert list(read_parquet(out)) == every


# -- the verb


def run(*words: str) -> int:
    return export.run(list(words))


def test_the_verb_writes_the_file_whole_and_says_so(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old")

    assert run(str(run_dir), "--out", str(out)) == 0

    with open(out) as lines:
        count = len(list(read_jsonl(lines)))
    said = capsys.readouterr()
    assert said.out.startswith(f"{count:,} rows in ")
    assert said.err == ""  # nobody looks on: no progress
    assert out.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []


def test_the_verb_writes_to_stdout(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(run_dir), "--out", "-", "--every", "10s") == 0

    assert len(list(read_jsonl(capsys.readouterr().out.splitlines()))) > 100


def test_a_run_without_telemetry_has_its_history_and_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(tmp_path / "run")

    assert run(str(tmp_path / "run"), "--out", str(tmp_path / "out")) == 0

    said = capsys.readouterr()
    assert said.err == "gpulaunch export: telemetry.sqlite is missing: there are no samples\n"
    assert said.out.startswith("4 rows in ")


def test_an_event_of_no_time_at_all_is_left_out(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    with open(tmp_path / "run" / "events.jsonl", "a") as history:
        history.write(f'{{"event": "odd", "time_s": 1{"0" * 400}}}\n')

    assert "odd" not in [row.name for row in rows_of(tmp_path / "run", notes=[])]


def test_what_cannot_be_read_is_not_blamed_on_what_is_written(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "node-1").mkdir()
    closed(run_dir / "node-1", monkeypatch)

    assert run(str(run_dir), "--out", "-") == 0

    assert capsys.readouterr().err == (
        "gpulaunch export: telemetry.sqlite cannot be read: Permission denied\n"
        "gpulaunch export: node-1/findings.jsonl cannot be read: Permission denied\n"
    )


def test_nothing_to_write_is_told_by_the_code_and_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.json").write_text("{}")

    assert run(str(tmp_path / "run"), "--out", str(tmp_path / "out")) == 1

    assert not (tmp_path / "out").exists()
    assert "nothing to export" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--out"], "expected one argument"),
        ([], "required: --out"),
        (["nowhere", "--out", "x"], "no run directory nowhere"),
        (["a", "b", "--out", "x"], "one run at a time"),
        (["RUN", "--out", "x", "--format", "csv"], "invalid choice"),
        (["RUN", "--out", "-", "--format", "parquet"], "needs a file"),
        (["RUN", "--out", "/proc/nowhere/x"], "cannot write /proc/nowhere/x"),
        (["RUN", "--out", "x", "--every", "often"], "expected a time"),
        (["RUN", "--out", "x", "--evry", "1s"], "unknown argument --evry"),
    ],
)
def test_wrong_words_are_one_line(run_dir: Path, words: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told) as refused:
        run(*(str(run_dir) if word == "RUN" else word for word in words))

    assert "\n" not in str(refused.value)


def test_what_is_no_file_is_not_replaced_by_one(run_dir: Path, tmp_path: Path) -> None:
    """Whoever may replace /dev/null would miss it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(
        UsageError, match=r"cannot write .*pipe: it exists and is not a file; specify a file with --out"
    ):
        run(str(run_dir), "--out", str(pipe))

    assert pipe.is_fifo()


def test_without_pyarrow_one_line_says_what_to_install(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(UsageError, match=r"pip install 'gpulaunch\[parquet\]'"):
        run(str(run_dir), "--out", str(tmp_path / "out"), "--format", "parquet")
    assert not (tmp_path / "out").exists()


def test_each_thousand_rows_are_told() -> None:
    doing = Activity("reading the run")

    lines = [doing.line() for _ in export.counted(range(3000), doing, share_of=lambda row: row / 3000)]

    told = [line.rpartition(",")[0] for line in lines]  # without the time that it took
    assert told[0] == told[999] == "reading the run"
    assert told[1000] == told[1999] == f"1,000 rows {bar(999 / 3000)}"
    assert told[-1] == f"2,000 rows {bar(1999 / 3000)}"


def test_two_nodes_are_told_apart(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    begin(run_dir)
    keep(run_dir, [state(second) for second in range(1, 5)])
    keep(run_dir / "node-1", [state(second, ranks=(2, 3), node=1) for second in range(1, 5)], channel="channel-1")

    found = {(row.node, row.rank) for row in rows(run_dir) if row.name == "gpulaunch_steps_total"}

    assert found == {(0, 0), (0, 1), (1, 2), (1, 3)}


def test_a_damaged_file_costs_its_samples_and_a_note(run_dir: Path) -> None:
    (run_dir / "telemetry.sqlite").write_bytes(os.urandom(5000))
    (run_dir / "events.jsonl").write_text(line("run_started", 0))
    notes: list[str] = []

    found = list(rows_of(run_dir, notes=notes))

    assert [row.kind for row in found] == ["event"]
    assert len(notes) == 1
    assert "damaged" in notes[0]
