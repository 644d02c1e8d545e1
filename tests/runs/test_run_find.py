"""Which run is meant, whatever lies below gpulaunch-runs; each thing that is no run is told in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulaunch.launcher.runs.find import find_run, find_under_way, here
from gpulaunch.launcher.runs.processes import RunError

HOLD = "import os, sys, time\nfd = os.open(sys.argv[1], os.O_RDONLY)\nprint('held', flush=True)\ntime.sleep(600)"
NOBODY = 65534
Start = Callable[[Path], Path]


def a_run(path: Path, *, file: str = "job.json", at_s: int = 1000) -> Path:
    path.mkdir(parents=True)
    (path / file).write_text("{}")
    os.utime(path / file, (at_s, at_s))
    return path


@pytest.fixture
def start() -> Iterator[Start]:
    """Have a process hold a directory, as the agent that runs there does."""
    agents: list[subprocess.Popen[bytes]] = []

    def one(run_dir: Path) -> Path:
        agent = subprocess.Popen([sys.executable, "-c", HOLD, str(run_dir)], stdout=subprocess.PIPE)
        agents.append(agent)
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"held\n"
        (run_dir / "job.json").write_text(json.dumps({"gpulaunch_pid": agent.pid}))
        return run_dir

    yield one
    for agent in agents:
        agent.kill()
        agent.communicate()


# -- under way or over


def test_a_run_by_its_path_or_its_name(tmp_path: Path) -> None:
    run = a_run(tmp_path / "gpulaunch-runs" / "job")

    for name in ("job", "gpulaunch-runs/job", "./gpulaunch-runs/../gpulaunch-runs/job", str(run)):
        assert os.path.samefile(find_run(name, str(tmp_path)), run)
    assert os.path.samefile(find_run(".", str(run)), run)


def test_the_newest_is_the_one_whose_file_is(tmp_path: Path) -> None:
    """The directory itself changes all the time, and what has no such file does not count."""
    runs = tmp_path / "gpulaunch-runs"
    newer, older = a_run(runs / "b", at_s=2000), a_run(runs / "a", at_s=1000)
    (runs / "no run").mkdir()
    (runs / "a file").touch()
    (older / "stacks.folded").touch()

    assert find_run(None, str(tmp_path)) == str(newer)
    assert find_run(None, str(tmp_path), having="stacks.folded") == str(older)


def test_a_directory_that_holds_what_is_asked_for_will_do(tmp_path: Path) -> None:
    """Somebody has copied the one file; or all nodes of a job but the first."""
    copied = a_run(tmp_path / "copied", file="stacks.folded")
    (tmp_path / "shared" / "node-1").mkdir(parents=True)

    assert find_run("copied", str(tmp_path), having="stacks.folded") == str(copied)
    assert find_run("shared", str(tmp_path)) == str(tmp_path / "shared")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere", "there is no run directory nowhere, neither here nor in "),
        ("", "there is no run directory '', neither here nor in "),
        ("x" * 5000, "there is no run directory xxx"),
        ("a\nb", "there is no run directory a\nb"),
        ("a file", "there is no run directory a file"),
        ("empty", "/empty is not a run directory: it contains no job.json"),
        (None, "no runs in "),
    ],
)
def test_what_is_no_run_is_told(tmp_path: Path, name: str | None, why: str) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "empty").mkdir()

    with pytest.raises(RunError) as told:
        find_run(name, str(tmp_path))
    assert why in str(told.value)


@pytest.mark.root
def test_the_run_of_another_user_is_told_as_such() -> None:
    """Its directory is for its owner only."""
    program = (
        "import contextlib, io, os, sys\n"
        "from gpulaunch.launcher.cli import main\n"
        "with contextlib.redirect_stderr(io.StringIO()):\n"  # once as root: it may not read Python's own files later
        "    main.main([*sys.argv[2:], 'nowhere'])\n"
        "os.chdir(sys.argv[1])\n"
        f"os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "sys.exit(main.main(sys.argv[2:]))"
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm") as base:  # pytest's own directories are for one user
        os.chmod(base, 0o755)
        mine = a_run(Path(base, "gpulaunch-runs", "mine"))
        mine.chmod(0o700)
        for words, why in (
            (
                ["flame", "mine"],
                f"flame: cannot read {mine}: Permission denied; only its owner can read a run directory",
            ),
            (["trace", "--job-dir", "mine"], "trace: none of your runs is active in mine: Permission denied"),
            (["trace"], f"trace: no run is active in {mine.parent}; specify its run directory with --job-dir"),
        ):
            done = subprocess.run(
                [sys.executable, "-c", program, base, *words], capture_output=True, text=True, timeout=60, check=False
            )
            assert (done.returncode, done.stderr) == (2, f"gpulaunch: error: {why}\n")


# -- under way


def test_the_only_run_under_way_is_found(start: Start, tmp_path: Path) -> None:
    runs = tmp_path / "gpulaunch-runs"
    running = start(a_run(runs / "running"))
    over = a_run(runs / "over")
    (over / "job.json").write_text((running / "job.json").read_text())  # a number that somebody else has now
    (runs / "no job at all").mkdir()

    for name in (None, "running", str(running)):
        assert find_under_way(name, str(tmp_path)) == str(running)


def test_none_and_several_are_told_in_one_line(start: Start, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run is active in .*; specify its run directory with --job-dir"):
        find_under_way(None, str(tmp_path))
    for name in ("a", "b"):
        start(a_run(tmp_path / "gpulaunch-runs" / name))

    with pytest.raises(RunError, match=r"2 runs .*--job-dir: .*/a, .*/b$"):
        find_under_way(None, str(tmp_path))


def test_why_a_run_is_not_under_way_is_told(tmp_path: Path) -> None:
    a_run(tmp_path / "over")
    (tmp_path / "other").mkdir()

    with pytest.raises(RunError, match="none of your runs is active in over: the run has ended"):
        find_under_way("over", str(tmp_path))
    with pytest.raises(RunError, match="none of your runs is active in other: it is not a run directory"):
        find_under_way("other", str(tmp_path))
    with pytest.raises(RunError, match="there is no run directory nowhere"):
        find_under_way("nowhere", str(tmp_path))


def test_a_current_directory_that_is_gone_has_no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    for find in (find_run, find_under_way):
        with pytest.raises(RunError, match=r"in \./gpulaunch-runs"):
            find(None, here())
