"""The report that a job leaves without being asked: whenever it made steps, however it ended; else none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from parsed import parse

if TYPE_CHECKING:
    from tests.conftest import Ended, Launcher

TRAINS = """
import os, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 20 and os.environ["RANK"] == os.environ.get("FAILS"):
        raise RuntimeError("<b>planted</b>")
"""


def lines_about_a_report(stderr: str) -> list[str]:
    return [line.partition(" ")[2] for line in stderr.splitlines() if "report.html" in line]


def reported(
    gpulaunch: Launcher, tmp_path: Path, *, code: int, env: dict[str, str] | None = None
) -> tuple[Ended, Path]:
    """Run it; give how it ended, and its directory.

    A report that takes longer than a job is held up for is left out, and it steps back behind everything else: where
    others have the cores, the job is run again.
    """
    (tmp_path / "train.py").write_text(TRAINS)
    for run in ("run-1", "run-2", "run-3"):
        ended = gpulaunch("--nproc", "2", "--job-dir", run, "train.py", env=env or {})
        assert ended.code == code, ended
        if "no report.html: it took too long" not in ended.stderr:
            assert lines_about_a_report(ended.stderr) == [f"report in ./{run}/report.html"], ended
            return ended, tmp_path / run
        assert list((tmp_path / run).glob("*.html*")) == [], "a whole one or none"
    raise AssertionError(f"three times there was no report: {ended}")


@pytest.mark.alone
@pytest.mark.torch
def test_a_job_that_succeeds_leaves_a_report_and_says_where(gpulaunch: Launcher, tmp_path: Path) -> None:
    ended, run = reported(gpulaunch, tmp_path, code=0)

    assert "report.html" in ended.stderr.splitlines()[-1], "it is told when it is written"
    page = parse((run / "report.html").read_text())
    assert page.wrong == []
    assert page.title == "train: finished - gpulaunch report"
    steps = next(table for table in page.tables if table[0][:2] == ["Rank", "Steps"])
    assert [(row[0], row[1]) for row in steps[1:]] == [("0", "40"), ("1", "40")]
    assert sorted(each.name for each in run.glob("*.html*")) == ["report.html"]


@pytest.mark.alone
@pytest.mark.torch
def test_a_job_that_fails_leaves_one_with_its_first_cause(gpulaunch: Launcher, tmp_path: Path) -> None:
    ended, run = reported(gpulaunch, tmp_path, code=1, env={"FAILS": "1"})

    # What failed is the last thing to be read.
    assert ended.stderr.index("report.html") < ended.stderr.index("first cause, "), ended
    page = parse((run / "report.html").read_text())
    assert page.wrong == []
    assert page.title == "train: failed - gpulaunch report"
    attempts = next(table for table in page.tables if table[0][0] == "Attempt")
    assert [(row[0], row[3], row[4]) for row in attempts[1:]] == [("0", "failed", "exception")]
    assert "rank 1" in attempts[1][5]
    assert "RuntimeError: <b>planted</b>" in attempts[1][5]
    assert [text for _, text in page.headings if text.startswith("Why ")] == ["Why attempt 0 failed"]


def test_a_job_that_makes_no_step_leaves_none(gpulaunch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')\n")

    ended = gpulaunch("--nproc", "2", "--job-dir", "run", "hello.py")

    assert ended.code == 0, ended
    assert ended.stdout.count("hello") == 2
    assert lines_about_a_report(ended.stderr) == [], ended
    assert (tmp_path / "run" / "summary.json").exists()
    assert list((tmp_path / "run").glob("*.html*")) == []


@pytest.mark.torch
def test_a_job_whose_steps_nobody_watches_leaves_none(gpulaunch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)

    ended = gpulaunch("--nproc", "1", "--no-profile", "--job-dir", "run", "train.py")

    assert ended.code == 0, ended
    assert lines_about_a_report(ended.stderr) == [], ended
    assert list((tmp_path / "run").glob("*.html*")) == []
