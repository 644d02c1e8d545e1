"""What the tests of findings share: runs of programs with their reports, and a node of which there is but what its
sources say."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "device"))
sys.path.insert(0, str(Path(__file__).parent))

from recorded import Recorded
from running import Program, Train, Trained


@pytest.fixture
def train(gpulaunch: Any, tmp_path: Path) -> Train:
    """Run programs beside each other, each under a command of its own, to their end; give what their reports say."""

    def run(*programs: Program) -> list[Trained]:
        before = len(list(tmp_path.glob("run-*")))
        directories = [tmp_path / f"run-{before + number}" for number in range(len(programs))]
        started = [
            gpulaunch.start(*("--nproc", str(each.ranks), "--job-dir", directory, each.path, *each.args), env=each.env)
            for each, directory in zip(programs, directories, strict=True)
        ]
        return [report(running.wait(180.0), directory) for running, directory in zip(started, directories, strict=True)]

    def report(ended: Any, directory: Path) -> Trained:
        assert ended.code == 0, ended
        told = gpulaunch("report", directory, "--json")
        assert told.code == 0, told
        said = json.loads(told.stdout)
        assert said["watched"], ended
        timed = re.findall(r"rank (\d+) step_ms ([\d.]+)", ended.stdout)
        return Trained(
            step_ms={int(rank): float(ms) for rank, ms in timed}, output=ended.stdout, findings=said["findings"]
        )

    return run


@pytest.fixture
def two_cores() -> Iterator[None]:
    """What is too much for a machine depends on its cores: these programs have two."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    os.sched_setaffinity(0, sorted(allowed)[:2])
    yield
    os.sched_setaffinity(0, allowed)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a node; see recorded.py."""
    made: list[Recorded] = []

    def make(**options: Any) -> Recorded:
        made.append(Recorded(tmp_path / f"node-{len(made)}", monkeypatch, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
