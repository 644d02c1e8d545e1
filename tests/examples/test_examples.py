"""The examples do what they promise: under gpulaunch, under torchrun's contract, and alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


def accuracy_of(output: str) -> float:
    """The percentage of the last line `test accuracy 97.2 %`."""
    (percent,) = re.findall(r"^(?:\[0\] )?test accuracy ([\d.]+) %$", output, re.MULTILINE)
    return float(percent)


def losses_of(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


def test_digits_reach_95_percent_on_two_ranks(gpulaunch) -> None:
    """Trained by two ranks, with dataloader workers, counted on images that no rank trained on."""
    ended = gpulaunch("--nproc", "2", EXAMPLES / "digits_ddp.py", "--require-accuracy", timeout_s=280)

    assert ended.code == 0, ended
    assert accuracy_of(ended.stdout) >= 95.0
    assert len(losses_of(ended.stdout)) == 12
    assert losses_of(ended.stdout)[-1] < 0.5 * losses_of(ended.stdout)[0]


def test_digits_run_alone(tmp_path: Path) -> None:
    """`python digits_ddp.py` is the same program with a group of one."""
    command = [sys.executable, str(EXAMPLES / "digits_ddp.py"), "--epochs", "1", "--workers", "0"]

    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=280)

    assert done.returncode == 0, done.stderr
    assert 20.0 < accuracy_of(done.stdout) < 100.0


def test_digits_say_when_the_required_accuracy_is_missed(gpulaunch) -> None:
    """One epoch of tiny steps learns nothing; only --require-accuracy makes that an error."""
    ended = gpulaunch(
        "--nproc",
        "2",
        EXAMPLES / "digits_ddp.py",
        "--epochs",
        "1",
        "--workers",
        "0",
        "--lr",
        "1e-6",
        "--require-accuracy",
    )

    assert ended.code == 1, ended
    assert "too low: --require-accuracy asks for 95 %" in ended.stderr


def test_gpt_learns_from_the_standard_library_with_fsdp(gpulaunch) -> None:
    ended = gpulaunch("--nproc", "2", EXAMPLES / "gpt_fsdp.py", "--steps", "60", "--sample", "40", timeout_s=280)

    assert ended.code == 0, ended
    first, *_, last = losses_of(ended.stdout)
    assert last < 0.75 * first
    assert "--- what it writes ---" in ended.stdout
