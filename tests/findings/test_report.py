"""`gpulaunch report` tells what a run's profiler found, for people and for machines."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpulaunch.exporters.files.findings import FindingsFile
from gpulaunch.exporters.view.as_json import from_json
from gpulaunch.exporters.view.model import Status
from gpulaunch.launcher.cli import report
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.profiler.record import Finding

SYNC = Finding(
    rule="sync-every-step",
    file="train.py",
    line=88,
    subject="",
    ranks=(0, 1),
    seconds_per_step=0.0124,
    seconds_per_hour=372.0,
    confidence=0.7,
    evidence={"kind": "item"},
    advice="Read it every N steps.",
)
LEAK = replace(
    SYNC, rule="host-memory-growth", file=None, line=None, subject="trainer", ranks=(3,), seconds_per_step=0.0
)
LEAK = replace(LEAK, seconds_per_hour=0.0, advice="Keep less.")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def a_run(path: Path, *findings: Finding, began_s: float = 1000.0) -> Path:
    path.mkdir(parents=True)
    (path / "job.json").write_text("{}")
    os.utime(path / "job.json", (began_s, began_s))
    FindingsFile(path / "findings.jsonl").tell(findings, began_s)
    return path


def test_the_newest_run_is_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(here / "gpulaunch-runs" / "old", LEAK, began_s=1000.0)
    a_run(here / "gpulaunch-runs" / "new", SYNC, began_s=2000.0)

    assert report.run([]) == 0

    out = capsys.readouterr().out
    assert out == (
        f"{here}/gpulaunch-runs/new: 1 finding\n"
        "\n"
        "sync-every-step train.py:88\n"
        "  12.4 ms of every step, 372 s of every hour; ranks 0, 1; confidence 70%\n"
        "  Read it every N steps.\n"
    )


def test_a_loss_of_seconds_is_told_in_seconds(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(here / "slow", replace(SYNC, seconds_per_step=2.643, seconds_per_hour=3498.0))

    assert report.run(["slow"]) == 0
    assert "  2.64 s of every step, 3498 s of every hour; " in capsys.readouterr().out


def test_a_run_is_named_by_its_directory_or_its_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(here / "gpulaunch-runs" / "mine", LEAK)
    a_run(here / "elsewhere", SYNC)

    for name, rule in (("mine", LEAK.rule), ("elsewhere", SYNC.rule), (str(here / "elsewhere"), SYNC.rule)):
        assert report.run([name, "--json"]) == 0
        assert [found["rule"] for found in json.loads(capsys.readouterr().out)["findings"]] == [rule]


def test_the_json_has_what_others_rely_on_largest_loss_first(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(here / "gpulaunch-runs" / "mine", LEAK, SYNC)

    assert report.run(["--json"]) == 0

    said = json.loads(capsys.readouterr().out)
    assert (said["version"], said["run"], said["watched"]) == (1, str(run), True)
    assert [found["rule"] for found in said["findings"]] == ["sync-every-step", "host-memory-growth"]
    assert {"rule", "file", "line", "ranks", "seconds_per_step", "confidence", "evidence"} <= said["findings"][0].keys()


def test_the_json_has_everything_that_is_known_of_the_run_and_no_secret(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(here / "gpulaunch-runs" / "mine", replace(SYNC, subject="HF_TOKEN=very-secret-word"))
    command = ["gpulaunch", "train.py", "--hf-token", "very-secret-word", "API_KEY=very-secret-word", "--lr", "3"]
    (run / "job.json").write_text(json.dumps({"version": 1, "command": command}))

    assert report.run(["mine", "--json"]) == 0

    text = capsys.readouterr().out
    said = json.loads(text)
    view = from_json(said["view"])
    assert (view.run_dir, view.status) == (str(run), Status.UNKNOWN)
    assert [found.rule for found in view.findings] == [found["rule"] for found in said["findings"]] == [SYNC.rule]
    assert {"ranks", "attempts", "goodput_seconds", "restarts", "sites", "devices", "collectors"} <= said["view"].keys()
    assert "very-secret-word" not in text
    assert "3" in view.command


def test_all_nodes_of_a_run_are_in_one_report(here: Path) -> None:
    run = here / "shared"
    a_run(run / "node-0", LEAK)
    a_run(run / "node-1", SYNC)

    assert [found["rule"] for found in report.collect(run)["findings"]] == ["sync-every-step", "host-memory-growth"]


def test_what_all_nodes_have_is_one_of_the_first_three_lines(here: Path) -> None:
    run = here / "shared"
    for node in range(4):
        a_run(run / f"node-{node}", replace(SYNC, seconds_per_hour=100.0 * (node + 1)), LEAK)

    sync, leak = report.headlines(str(run))

    assert sync.startswith("found: sync-every-step train.py:88: ")
    assert ", 400 s of every hour; " in sync
    assert leak.startswith("found: host-memory-growth ")


def test_what_costs_no_time_says_so(here: Path) -> None:
    said = report.as_text(report.collect(a_run(here / "run", LEAK)))

    assert "host-memory-growth (trainer)\n  costs no time, or none yet; rank 3; " in said


def test_what_is_over_says_so(here: Path) -> None:
    run = a_run(here / "run", SYNC)
    FindingsFile(run / "findings.jsonl").tell((), 2000.0)

    assert "sync-every-step train.py:88, no longer active\n" in report.as_text(report.collect(run))


def test_what_only_an_earlier_run_in_the_directory_had_is_said_to_be_its(here: Path) -> None:
    run = a_run(here / "run", SYNC, began_s=1000.0)
    (run / "events.jsonl").write_text('{"event": "run_started", "time_s": 1500.0}\n')
    os.utime(run / "findings.jsonl", (1000.0, 1000.0))
    unwatched = report.collect(run)
    assert (unwatched["watched"], [found["earlier"] for found in unwatched["findings"]]) == (False, [True])
    assert report.as_text(unwatched).splitlines()[0].endswith(": this run was not profiled")

    FindingsFile(run / "findings.jsonl").tell((), 2000.0)
    first, _, finding, *_ = report.as_text(report.collect(run)).splitlines()
    assert first.endswith(": nothing found")
    assert finding == "sync-every-step train.py:88, in an earlier run only"


def test_how_a_run_ended_is_said_before_what_was_found(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(here / "gpulaunch-runs" / "failed", began_s=1000.0)
    (run / "events.jsonl").write_text(
        '{"event": "run_started", "time_s": 1000.0}\n{"event": "run_ended", "time_s": 1012.0, "exit_code": 1}\n'
    )
    (run / "summary.json").write_text('{"version": 1, "exit_code": 1, "error": "rank 1: ValueError: no such batch"}')

    assert report.run([]) == 0

    _, standing = capsys.readouterr().out.splitlines()
    assert standing.startswith("Failed after 12 s, exit code 1; ")
    assert standing.endswith(". rank 1: ValueError: no such batch.")


def test_where_the_time_goes_is_said_where_nothing_was_found(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (a_run(here / "found", SYNC), a_run(here / "nothing")):
        (run / "stacks.folded").write_text(
            "forward;<module> (train.py:9);net (train.py:3) 60\nbackward;<module> (train.py:10) 40\n"
        )
        assert report.run([str(run)]) == 0

    found, nothing = capsys.readouterr().out.split("nothing: ")
    assert "Most time" not in found
    assert nothing.splitlines()[-1] == (
        "Most time is spent in train.py:9 (60%) and train.py:10 (40%), below that in net at train.py:3 (60%)."
    )


def test_nothing_found_is_another_thing_than_nobody_looked(here: Path) -> None:
    watched = report.as_text(report.collect(a_run(here / "watched")))
    (here / "unwatched").mkdir()
    unwatched = report.as_text(report.collect(here / "unwatched"))

    assert watched.endswith("watched: nothing found")
    assert unwatched.endswith("unwatched: this run was not profiled")
    (here / "unwatched" / "job.json").write_text('{"version": 1, "profile": false}')
    assert report.as_text(report.collect(here / "unwatched")).endswith(": this run was not profiled (--no-profile)")


@pytest.mark.parametrize("line", ['{"version": 1, "rule"', '{"version": 2}'])
def test_nothing_found_is_another_thing_than_nothing_read(here: Path, line: str) -> None:
    run = a_run(here / "run")
    (run / "findings.jsonl").write_text(line)

    first, note = report.as_text(report.collect(run)).splitlines()

    assert first.startswith(f"{run}: findings are unknown")
    assert note.startswith("note: findings.jsonl is ")


def test_the_json_is_json_whatever_a_finding_rests_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(here / "gpulaunch-runs" / "mine", SYNC)
    evidence = f'"a": 1e999, "b": [NaN, 7], "c": {"[" * 900}{"]" * 900}, "kind"'
    (run / "findings.jsonl").write_text((run / "findings.jsonl").read_text().replace('"kind"', evidence))

    assert report.run(["--json"]) == 0

    said = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    (found,) = said["findings"]
    assert (found["evidence"]["a"], found["evidence"]["b"], found["evidence"]["kind"]) == (None, [None, 7], "item")


HOSTILE = (
    "a\x1b]0;owned\x07.py",  # sets the title of a terminal
    "a\x1b[31mred\x1b[0m.py",
    "a\x9b2Jb.py",  # the same controls in one byte
    "a.py\nstraggler b.py:1\n  99 ms of every step",  # passes for a finding
    "a\rb.py",
    "a\u202eyp.b.py",  # is read from right to left
    "a\u2028b.py",
    "<script>alert(1)</script>.py",
    "caf\udce9.py",  # a name that is no UTF-8, as Python has it
    "\ud800",
    "\0",
)


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_hostile_name_does_no_harm(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Files, functions, subjects: programs make their names of anything. They reach people, and machines, whole."""
    run = a_run(here / "gpulaunch-runs" / "mine", replace(SYNC, file=name, subject=name, evidence={"kind": name}))

    assert report.run([]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) == 5
    assert text.splitlines()[2].startswith("sync-every-step ")
    assert all(line.isprintable() for line in text.split("\n"))
    assert [line.isprintable() for line in report.headlines(str(run))] == [True]

    assert report.run(["--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["file"], found["subject"], found["evidence"]) == (name, name, {"kind": name})


def test_what_prints_is_shown_as_it_is(here: Path) -> None:
    said = report.as_text(report.collect(a_run(here / "run", replace(SYNC, file="mod\u00e8le <b>.py"))))

    assert "sync-every-step mod\u00e8le <b>.py:88\n" in said


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "no runs in "),
        (["nosuch"], "there is no run directory nosuch"),
        (["--jsn"], "unknown argument --jsn; did you mean --json?"),
        (["a", "b"], "one run at a time, not 2: a b"),
    ],
)
def test_what_cannot_be_reported_is_said_in_one_line(here: Path, argv: list[str], complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        report.run(argv)

    assert complaint in str(caught.value)


def test_help_is_an_answer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.run(["--help"]) == 0
    assert "--json" in capsys.readouterr().out
