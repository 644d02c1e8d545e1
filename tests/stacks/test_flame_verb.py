"""`gpulaunch flame`: which run is meant, what it writes and says, and what it says when there is nothing."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from speedscope_format import faults_of

from gpulaunch.launcher.cli import flame
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.profiler.samplers.folded import STACKS_FILE

STACKS = """\
startup;<module> (train.py:1);import (torch/__init__.py:1) 1
data_wait;<module> (train.py:9);__next__ (torch/utils/data/dataloader.py:7) 6
forward;<module> (train.py:10);loss (net.py:5) 2
forward;<module> (train.py:10);forward (net.py:3) 1
"""


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def a_run(cwd: Path, name: str, stacks: str | None = STACKS, *, at_s: int = 0) -> Path:
    run = cwd / "gpulaunch-runs" / name
    (run / "attempts").mkdir(parents=True)
    if stacks is not None:
        (run / STACKS_FILE).write_text(stacks)
        os.utime(run / STACKS_FILE, (at_s, at_s))
    return run


def test_it_draws_each_phase_and_says_where_the_time_was(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(cwd, "job")

    assert flame.run([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "phase       samples  share  most often in",
        "startup           1    10%  import (torch/__init__.py:1) (100%)",
        "data_wait         6    60%  __next__ (torch/utils/data/dataloader.py:7) (100%)",
        "forward           3    30%  loss (net.py:5) (67%)",
        "drawn in ./gpulaunch-runs/job/flame: all.svg, an SVG for each phase, stacks.speedscope.json",
    ]
    files = sorted(path.name for path in (run / "flame").iterdir())
    assert files == ["all.svg", "data_wait.svg", "forward.svg", "stacks.speedscope.json", "startup.svg"]
    assert {(run / "flame" / name).stat().st_mode & 0o777 for name in files} == {0o600}
    for name in files[:3]:
        ElementTree.parse(run / "flame" / name)


def test_the_whole_graph_has_the_phases_as_its_outermost_frames(cwd: Path) -> None:
    run = a_run(cwd, "job")
    flame.run([])

    content = json.loads((run / "flame/stacks.speedscope.json").read_text())
    assert faults_of(content) == []
    assert [(one["name"], one["endValue"]) for one in content["profiles"]] == [
        ("all", 10),
        ("startup", 1),
        ("data_wait", 6),
        ("forward", 3),
    ]
    frames = [frame["name"] for frame in content["shared"]["frames"]]
    assert {frames[sample[0]] for sample in content["profiles"][0]["samples"]} == {"startup", "data_wait", "forward"}
    assert ">data_wait: 6 of 10 samples, 60.0 %<" in (run / "flame/all.svg").read_text()


def test_again_and_somewhere_else(cwd: Path) -> None:
    run = a_run(cwd, "job")
    flame.run([])
    (run / STACKS_FILE).write_text("forward;main (a.py:1) 5\n")

    assert flame.run([]) == 0
    assert "5 of 5 samples" in (run / "flame/all.svg").read_text()
    assert flame.run(["--out", "elsewhere"]) == 0
    assert flame.run([f"--out={cwd}/there"]) == 0
    assert (cwd / "elsewhere/all.svg").read_bytes() == (cwd / "there/all.svg").read_bytes()


def test_all_nodes_of_a_run_are_in_one_graph(cwd: Path) -> None:
    run = a_run(cwd, "job", "forward;main (a.py:1) 5\n")
    (run / "node-1").mkdir()
    (run / "node-1" / STACKS_FILE).write_text("forward;main (a.py:1) 2\n")

    assert flame.run(["job"]) == 0
    assert "7 of 7 samples" in (run / "flame/all.svg").read_text()


def test_the_newest_run_is_the_newest_that_has_stacks(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(cwd, "older", at_s=1000)
    a_run(cwd, "newer", at_s=2000)
    a_run(cwd, "newest", None)

    assert flame.run([]) == 0
    assert "gpulaunch-runs/newer/flame" in capsys.readouterr().out


# -- nothing


@pytest.mark.parametrize("stacks", [None, "", "damaged\n\0\n"])
def test_a_run_without_stacks_says_why_that_may_be(
    cwd: Path, stacks: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(cwd, "job", stacks)

    assert flame.run(["job"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("no stacks in ./gpulaunch-runs/job: ")
    assert "gpulaunch doctor" in said
    assert not (run / "flame").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "has a stacks.folded; for a job with --job-dir, specify that directory. Possible reasons: the"),
        (["nowhere"], "there is no run directory nowhere"),
        (["--out"], "argument --out: expected one argument"),
        (["--uot", "x"], "unknown argument --uot; did you mean --out?"),
        (["a", "b"], "one run at a time, not 2: a b"),
    ],
)
def test_wrong_words_are_one_line(cwd: Path, argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=r"^flame: ") as told:
        flame.run(argv)

    assert message in str(told.value)
    assert "\n" not in str(told.value)


def test_where_it_may_not_write_it_says_so(cwd: Path) -> None:
    run = a_run(cwd, "job")
    (run / "flame").write_text("in the way")

    with pytest.raises(UsageError, match=r"cannot write to .*/flame: File exists; specify a directory with --out"):
        flame.run([])


def test_stacks_that_cannot_be_read_are_told(cwd: Path) -> None:
    run = a_run(cwd, "job", None)
    (run / STACKS_FILE).mkdir()

    with pytest.raises(UsageError, match=r"stacks\.folded: Is a directory"):
        flame.run(["job"])


def test_names_that_the_terminal_cannot_show(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(cwd, "job", "forward;gew\u00f6hnlich (a.py:1) 5\n")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)

    assert flame.run([]) == 0
    assert b"gew?hnlich (a.py:1)" in terminal.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["a\x1b]0;owned\x07", "b\udcff", "c\nd", "e;f <g>"])
def test_a_hostile_name_of_a_run_is_shown_and_not_obeyed(
    cwd: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(cwd, name)

    assert flame.run([name]) == 0
    assert [c for c in capsys.readouterr().out if not (c.isprintable() or c == "\n")] == []
    ElementTree.parse(run / "flame/all.svg")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flame.run([flag]) == 0
    assert capsys.readouterr().out.startswith("usage: gpulaunch flame ")
