"""Two real ranks, one of them held up on purpose: found, with the cause. For one that computes: test_planted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.exporters.files.findings import read_findings

pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).parents[1] / "findings/programs/straggler.py"
FOUND_WITHIN_S = 90.0
"""Two windows of 5 s are enough where nobody else is on the machine."""
Finds = Callable[[str, str], dict[str, Any]]


@pytest.fixture
def finds(gpulaunch: Any, tmp_path: Path) -> Finds:
    """Run the program with one cause until its straggler is found with it, and give what is said of it.

    What else is at the machine may hold up a rank for a while, too: that is found first, then.
    """
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs a core for each rank")

    def stragglers(job_dir: Path) -> list[dict[str, Any]]:
        return [found for found in read_findings(job_dir / "findings.jsonl") if found["rule"] == "straggler"]

    def straggler(job_dir: Path, cause: str) -> dict[str, Any] | None:
        told = ([1], cause)
        return next((each for each in stragglers(job_dir) if (each["ranks"], each["evidence"]["cause"]) == told), None)

    def run(by: str, cause: str) -> dict[str, Any]:
        job_dir = tmp_path / "run"
        seconds = str(FOUND_WITHIN_S)
        job = gpulaunch.start("--nproc", "2", "--job-dir", job_dir, PROGRAM, "--seconds", seconds, env={"LATE_BY": by})
        end_s = time.monotonic() + FOUND_WITHIN_S
        while (found := straggler(job_dir, cause)) is None and time.monotonic() < end_s:
            time.sleep(0.2)
        job.signal(signal.SIGTERM)
        ended = job.wait()
        assert found is not None, (stragglers(job_dir), ended)
        return found

    return run


@pytest.mark.parametrize(
    ("by", "cause"),
    [
        pytest.param("input", "input", marks=pytest.mark.light),
        pytest.param("cpu", "CPU contention", marks=pytest.mark.alone),
        pytest.param("gc", "garbage collection", marks=pytest.mark.light),
    ],
)
def test_the_rank_is_found_and_why_it_is_late(finds: Finds, by: str, cause: str) -> None:
    assert finds(by, cause)["seconds_per_step"] > 0
