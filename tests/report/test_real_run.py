"""A run that was, with a failure and a restart in it, reported by the command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from parsed import parse

if TYPE_CHECKING:
    from tests.conftest import Launcher

pytestmark = pytest.mark.torch

PROGRAM = """
import os, sys, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 20 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        raise RuntimeError("<b>planted</b> \\x1b[31m")
"""


def test_a_run_that_failed_once_is_reported_with_its_first_cause(gpulaunch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    ended = gpulaunch("--nproc", "2", "--max-restarts", "1", "--job-dir", "run", "train.py")
    assert ended.code == 0, ended

    said = gpulaunch("report", "run", "--html", "--static")

    assert (said.code, said.stdout) == (0, "report in ./run/report.html\n"), said
    page = parse((tmp_path / "run" / "report.html").read_text())
    assert page.title == "train: finished - gpulaunch report"
    assert "; 1 restart; goodput " in page.text
    attempts = next(table for table in page.tables if table[0][0] == "Attempt")
    assert [(row[0], row[3], row[4]) for row in attempts[1:]] == [("0", "failed", "exception"), ("1", "finished", "-")]
    assert "rank 1" in attempts[1][5]
    assert "<b>planted</b>" in page.text  # as text: `parse` knows every element
    steps = next(table for table in page.tables if table[0][:2] == ["Rank", "Steps"])
    assert [row[0] for row in steps[1:]] == ["0", "1"]
    assert all(int(row[1]) >= 40 for row in steps[1:])
