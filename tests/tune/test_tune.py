"""`gpulaunch tune` on real programs. Each trial starts torch: about 3 s, and the steps that it measures."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.launcher.cli import tune
from gpulaunch.launcher.job.options import UsageError

STARVED = """
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Remote(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.rand(16), index % 2


open("written", "w").write("by a trial")
loader = DataLoader(Remote(), batch_size=8)
model = torch.nn.Linear(16, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.010)
"""
LINE = STARVED.splitlines().index("loader = DataLoader(Remote(), batch_size=8)") + 1


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A directory with a program whose training waits for a slow source of data."""
    (tmp_path / "train.py").write_text(STARVED)
    return tmp_path


def document(job: Path) -> dict[str, Any]:
    (path,) = job.glob("gpulaunch-runs/*/tune.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.torch
@pytest.mark.alone  # trials are compared until the sign is sure: beside others that takes longer than the budget
def test_a_starved_job_gets_workers_that_were_tried(gpulaunch: Any, job: Path) -> None:
    running = gpulaunch.start("tune", "--budget", "80s", "--apply", "train.py")
    running.wait_for("changed in every rank")
    running.wait_until(lambda _: (job / "written").exists())
    applied = json.loads(next(job.glob("gpulaunch-runs/train-2*/job.json")).read_text())["changes"]
    (job / "written").unlink()
    running.signal(signal.SIGTERM)
    ended = running.wait()

    told = document(job)
    assert json.loads(applied) == told["best"]
    best = told["best"]["loaders"][f"train.py:{LINE} <module>"]["num_workers"]
    (tried,) = [each for each in told["tried"] if each["change"] == told["best"]]
    assert best >= 2, ended
    assert tried["verdict"] == "gain", ended
    # 50 ms a step, of which 40 are waits.
    assert 0.5 < tried["gain_ratio"]["median"] < 6, ended
    assert f"+loader = DataLoader(Remote(), batch_size=8, num_workers={best})" in ended.stdout
    assert sorted(each.name for each in job.iterdir() if each.is_file()) == ["train.py"], "trials leave nothing behind"
    assert (job / "train.py").read_text() == STARVED
    (findings,) = job.glob("gpulaunch-runs/*-tune-*/findings.jsonl")
    assert [json.loads(line)["rule"] for line in findings.read_text().splitlines()] == ["dataloader-too-few-workers"]
    assert tried["rule"] in ("dataloader-too-few-workers", "")


@pytest.mark.torch
@pytest.mark.light
def test_a_job_that_waits_for_nothing_gets_no_advice(gpulaunch: Any, job: Path) -> None:
    fed = STARVED.replace("time.sleep(0.005)", "pass").replace("time.sleep(0.010)", "time.sleep(0.040)")
    (job / "train.py").write_text(fed)  # a batch takes half a millisecond: that is no part of a step
    ended = gpulaunch("tune", "--budget", "40s", "train.py")

    assert ended.code == 0, ended
    assert document(job)["best"] is None, ended
    assert "nothing was tried: no setting that this could change takes a part of the steps" in ended.stdout


@pytest.mark.torch
@pytest.mark.alone
def test_workers_that_alter_the_loss_are_refused(gpulaunch: Any, job: Path) -> None:
    """A dataset that gives something else in a worker, as one does that divides its files among them."""
    clear = "(get_worker_info() is None) * (index % 2) * torch.ones(16)"
    altered = STARVED.replace("torch.rand(16)", clear).replace("DataLoader, D", "DataLoader, get_worker_info, D")
    (job / "train.py").write_text(altered.replace("model = ", "torch.manual_seed(0)\nmodel = "))
    ended = gpulaunch("tune", "--budget", "60s", "train.py")

    told = document(job)
    assert ended.code == 0, ended
    assert told["best"] is None, ended
    assert any(each["failed"].startswith("alters the loss: ") for each in told["tried"]), ended


@pytest.mark.torch
def test_a_job_that_fails_is_told_with_its_own_traceback(gpulaunch: Any, job: Path) -> None:
    (job / "train.py").write_text("import torch\nraise ValueError('no such dataset')\n")
    ended = gpulaunch("tune", "train.py")

    assert ended.code == 1
    assert "ValueError: no such dataset" in ended.stdout
    assert ended.stderr.startswith("gpulaunch: error: tune: the job fails by itself: ")
    assert ended.stderr.count("\n") == 1
    assert not list(job.glob("gpulaunch-runs"))


@pytest.mark.torch
def test_a_job_of_few_steps_is_told(gpulaunch: Any, job: Path) -> None:
    (job / "train.py").write_text(STARVED.replace("100_000", "80"))
    ended = gpulaunch("tune", "train.py")

    assert ended.code == 1
    assert "the job ended after 10 steps; a trial needs 25 and 3 s" in ended.stderr


@pytest.mark.torch
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_the_trial_and_tells_what_was_learnt(
    gpulaunch: Any, job: Path, signum: int, code: int
) -> None:
    """The census of the test finds what would be left of a trial's processes and shared memory."""
    running = gpulaunch.start("tune", "--budget", "300s", "train.py")
    running.wait_for("as it is: ")
    running.signal(signum)
    ended = running.wait()

    assert ended.code == code
    assert document(job)["trials"] >= 1
    assert [path for path in os.listdir(os.environ.get("TMPDIR", "/tmp")) if "gpulaunch-tune" in path] == []


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "tune: no program is given"),
        (["--nnodes", "2", "train.py"], "several nodes"),
        (["--no-profile", "train.py"], "--no-profile"),
        (["--no-python", "train.py"], "--no-python"),
        (["--budget", "soon", "train.py"], "expected a time"),
        (["--bugdet", "5m", "train.py"], "unknown option --bugdet"),
        (["--nproc", "1", "--budget", "5m", "train.py"], "its own options come first"),
        (["--budget", "5s", "train.py"], "at least 15 s"),
        (["."], "is a directory"),
    ],
)
def test_what_cannot_be_tuned_is_said_in_one_line(
    job: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], complaint: str
) -> None:
    monkeypatch.chdir(job)
    with pytest.raises(UsageError) as caught:
        tune.run(argv)

    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
