"""A run that was, with a failure and a restart in it, reported by the command."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from parsed import parse

from gpulaunch.profiler.kernel import kernel

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
    with open(tmp_path / "run" / "events.jsonl") as history:
        began = next(line for line in map(json.loads, history) if line["event"] == "run_started")
    summed_up = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (began["run_id"], began["host"]) == (summed_up["run_id"], socket.gethostname())
    assert began["kernel"] == kernel(), "where its pid means something"

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


def test_a_run_that_was_stopped_is_told_as_such_wherever_one_looks(gpulaunch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import signal\nprint('waiting', flush=True)\nsignal.pause()\n")
    running = gpulaunch.start("--nproc", "2", "--no-profile", "--job-dir", "run", "wait.py")
    running.wait_until(lambda run: run.stdout.count("waiting") == 2)
    running.signal(signal.SIGINT)
    ended = running.wait()
    assert ended.code == 128 + signal.SIGINT, ended

    report, top, found = (
        gpulaunch(*words) for words in (("report", "run", "--md"), ("top", "run", "--once"), ("top", "run", "--json"))
    )

    assert report.stdout.startswith("# wait: stopped\n\nStopped after "), report
    assert " by SIGINT; no step was observed on 2 ranks; goodput unknown." in report.stdout
    assert "STOPPED by SIGINT" in top.stdout, top
    view = json.loads(found.stdout)
    assert (view["status"], view["stopped_by"], view["exit_code"]) == ("stopped", "SIGINT", 130)
    assert [attempt["status"] for attempt in view["attempts"]] == ["stopped"]

    # What the ranks did is not known, and nobody makes a figure of it.
    summed_up = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "steps were not observed (--no-profile); " in ended.stderr
    assert "goodput unknown, steps were not observed: " in ended.stderr
    assert summed_up["stopped_by"] == "SIGINT"
    assert "goodput unknown, no steps were observed; of " in top.stdout
    assert re.findall(r"^ +(\d+) .* not measured .* off$", top.stdout, re.M) == ["0", "1"], top
    for told in (summed_up["goodput_seconds"], view["goodput_seconds"]):
        assert (told["productive"], told["checkpoint_stall"]) == (None, None)
        assert told["startup"] > 0
    assert (view["steps"], view["goodput_ratio"], summed_up["samples_per_second"]) == (None, None, None)
    for rank in (*summed_up["ranks"].values(), *view["ranks"]):
        assert (rank["steps"], rank["samples"], rank["step_seconds"]) == (None, None, None)
