"""The console entry: exit codes, and one line for whatever goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpulaunch.launcher.cli import doctor
from gpulaunch.launcher.cli import main as entry


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPULAUNCH_DEBUG", raising=False)
    Path("train.py").write_text("")


def gpulaunch(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpulaunch", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--nprocc", "2", "train.py"], "gpulaunch: error: unknown option --nprocc; did you mean --nproc?"),
        (["--nproc", "0", "train.py"], "gpulaunch: error: --nproc: a job needs at least 1 rank per node, got 0"),
        (
            ["--rdzv-conf", "timeout=x", "train.py"],
            "gpulaunch: error: --rdzv-conf: timeout: expected a whole number of seconds, got 'x'",
        ),
        (["tarin.py"], "gpulaunch: error: no such script: tarin.py; did you mean train.py?"),
        (["--config", "no.toml"], "gpulaunch: error: cannot read the job file no.toml: No such file or directory"),
        (["doctor", "--jsn"], "gpulaunch: error: doctor: unknown argument --jsn; did you mean --json?"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_2(words: list[str], line: str) -> None:
    done = gpulaunch(*words)

    assert (done.returncode, done.stdout, done.stderr) == (2, "", line + "\n")


def test_python_m_gpulaunch_is_the_command_and_a_file_beside_the_program_is_no_module_of_ours() -> None:
    """Every test here runs it so; `-m` puts the current directory in front of the standard library."""
    for name in ("argparse.py", "json.py", "torch.py"):
        Path(name).write_text("raise SystemExit('a file of the user stood in for a module')")

    done = gpulaunch("--version")

    assert (done.returncode, done.stderr) == (0, "")


def test_no_words_at_all_says_what_is_missing() -> None:
    assert gpulaunch().stderr.startswith("gpulaunch: error: no program to run: ")


@pytest.mark.parametrize(("word", "first"), [("--help", "usage: gpulaunch"), ("--version", "gpulaunch ")])
def test_questions_are_answered_with_exit_0(word: str, first: str) -> None:
    done = gpulaunch(word)

    assert (done.returncode, done.stdout[: len(first)], done.stderr) == (0, first, "")


def test_dry_run_prints_the_plan_and_starts_nothing() -> None:
    Path("train.py").write_text("open('started', 'w')")
    done = gpulaunch("--dry-run", "--nproc", "2", "train.py")

    assert (done.returncode, done.stderr) == (0, "")
    assert "Rank 1" in done.stdout
    assert sorted(path.name for path in Path().iterdir()) == ["train.py"]


def test_filtered_lines_are_where_torchrun_has_them() -> None:
    Path("train.py").write_text("print('loss 1'); print('other')")
    words = ["--no-profile", "--start-method", "spawn", "--nproc", "2", "--log-dir", "logs", "--rdzv-id", "run7"]
    words += ["--master-port", "0", "--tee", "3", "--local-ranks-filter", "1", "--duplicate-stdout-filters", "loss"]
    done = gpulaunch(*words, "train.py")

    assert done.returncode == 0, done.stderr
    (filtered,) = Path("logs").glob("run7_*/attempt_0/filtered_stdout.log")
    assert filtered.read_text() == "[default1]:loss 1\n"


def test_teed_lines_have_the_prefix_that_was_asked_for_and_others_have_ours() -> None:
    words = ["--no-profile", "--nproc", "2", "--log-line-prefix-template", "<${role_name}/${rank}/${local_rank}> "]
    command = ["--no-python", "sh", "-c", "echo told; echo shown >&2"]
    done = gpulaunch(*words, "--tee", "1", *command)
    untold = gpulaunch(*words, *command)

    assert (done.returncode, untold.returncode) == (0, 0), done.stderr + untold.stderr
    assert sorted(done.stdout.splitlines()) == ["<default/0/0> told", "<default/1/1> told"]
    assert {"[0] shown", "[1] shown"} <= set(done.stderr.splitlines())
    assert sorted(untold.stdout.splitlines()) == ["[0] told", "[1] told"]
    said = "--log-line-prefix-template has no effect without --tee"
    assert (said in done.stderr, said in untold.stderr) == (False, True)


def test_dry_run_refuses_what_would_be_refused() -> None:
    Path("train.py").write_text("")
    wrong = (("--resume-arg", "--resume {pth}"), ("--checkpoint-pattern", "../ckpt"), ("--metrics-sd", "nowhere"))
    for option, value in wrong:
        refused = gpulaunch(option, value, "train.py")
        dry = gpulaunch("--dry-run", option, value, "train.py")

        assert (dry.returncode, dry.stdout, dry.stderr) == (2, "", refused.stderr)
        assert dry.stderr.startswith(f"gpulaunch: error: {option}: ")


def test_a_verb_wins_over_a_file_of_its_name() -> None:
    Path("doctor").write_text("")

    assert gpulaunch("doctor", "--help").stdout.startswith("usage: gpulaunch doctor")
    assert "./doctor" in gpulaunch("--dry-run", "./doctor").stdout


def test_a_reader_that_goes_away_is_no_error() -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for words in (["--help"], ["--version"], ["--dry-run", "train.py"], ["doctor", "--help"]):
        read_fd, write_fd = os.pipe()
        os.close(read_fd)
        command = [sys.executable, "-m", "gpulaunch", *words]
        done = subprocess.run(command, stdout=write_fd, stderr=subprocess.PIPE, env=buffered, check=False, timeout=60)
        os.close(write_fd)

        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("words", "what"),
    [(["report", "run"], "cannot write to stdout"), (["export", "run", "--out", "-"], "export: cannot write -")],
)
def test_a_full_disk_below_stdout_is_one_line_and_no_fault_of_ours(words: list[str], what: str) -> None:
    Path("run").mkdir()
    Path("run/job.json").write_text("{}")
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "gpulaunch", *words]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered, check=False, timeout=60
        )

    assert done.returncode == 2
    assert done.stderr.startswith(f"gpulaunch: error: {what}: No space left on device")
    assert done.stderr.count("\n") == 1


def test_a_fault_of_ours_is_one_line_and_exit_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(argv: object) -> int:
        raise KeyError("two\nlines")

    monkeypatch.setattr(doctor, "run", broken)

    assert entry.main(["doctor"]) == 70
    assert capsys.readouterr().err == (
        "gpulaunch: internal error: KeyError: 'two\\nlines'; please report; for details set GPULAUNCH_DEBUG=1\n"
    )
    monkeypatch.setenv("GPULAUNCH_DEBUG", "1")
    with pytest.raises(KeyError):
        entry.main(["doctor"])
