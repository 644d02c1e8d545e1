"""What the tests of gpulaunch.checkpoint share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulaunch.profiler.channel.control import ControlWriter, create


@pytest.fixture(autouse=True)
def outside_of_a_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is no rank, and keeps its own SIGTERM."""
    for name in ("RESUME_FROM", "CHECKPOINT_DIR", "CONTROL", "ATTEMPT", "RUN_ID"):
        monkeypatch.delenv(f"GPULAUNCH_{name}", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControlWriter:
    """The agent's end of this process's control page."""
    path = str(tmp_path / "control.bin")
    create(path)
    monkeypatch.setenv("GPULAUNCH_CONTROL", path)
    return ControlWriter(path)
