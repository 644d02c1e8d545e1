"""Training programs as forked ranks, for tests that look at the pages they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulaunch.profiler.channel import segment, segment_writer, workers
from gpulaunch.profiler.channel.segment import SegmentSnapshot

RANKS = str(Path(__file__).with_name("ranks.py"))

Run = Callable[..., SegmentSnapshot]


@pytest.fixture(scope="session")
def outside_a_run() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("GPULAUNCH_", "RANK"))}


@pytest.fixture(scope="module")
def nursery(outside_a_run: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """One process with torch in it, from which ranks are forked."""
    process = subprocess.Popen(
        [sys.executable, RANKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=outside_a_run
    )
    yield process
    process.communicate(timeout=60)


@pytest.fixture
def run(nursery: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Run a program of `ranks` to its end and read the page it leaves."""

    def run_program(program: str, **environ: str) -> SegmentSnapshot:
        path = str(tmp_path / "rank-3.bin")
        segment_writer.create(path, rank=3, local_rank=1, attempt=0)
        workers.create(str(tmp_path / "workers-3.bin"))
        extra = " ".join(f"{name}={value}" for name, value in environ.items())
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(f"{program}\t{tmp_path}\t{extra}\n")
        nursery.stdin.flush()
        code = nursery.stdout.readline().strip()
        assert code == "0", (tmp_path / "out").read_text()
        assert (tmp_path / "out").read_text() == "", "a rank that is well says nothing"
        return segment.read(path)

    return run_program
