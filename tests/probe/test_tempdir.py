"""The directory of a rank's multiprocessing sockets: named only where it can be, and never over one already chosen."""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.util
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.profiler.probe.tempdir import keep_sockets_together


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The configuration of this process, as it is before multiprocessing has needed a directory."""
    fresh: dict[str, Any] = {}
    monkeypatch.setattr(multiprocessing.process.current_process(), "_config", fresh)
    monkeypatch.setenv("RANK", "3")
    return fresh


def test_a_rank_has_a_directory_of_its_own(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPULAUNCH_CONTROL", "control.bin")

    keep_sockets_together()

    assert multiprocessing.util.get_temp_dir() == config["tempdir"] == "mp-3"
    assert (tmp_path / "mp-3").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "control",
    ["", f"/dev/shm/{'x' * 100}/control.bin", "/proc/no/such/place/control.bin"],
    ids=["none", "deep", "gone"],
)
def test_without_a_place_multiprocessing_makes_its_own(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, control: str
) -> None:
    monkeypatch.setenv("GPULAUNCH_CONTROL", control)

    keep_sockets_together()

    assert config == {}


def test_a_directory_that_is_there_already_stays(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config["tempdir"] = "chosen"
    monkeypatch.setenv("GPULAUNCH_CONTROL", "control.bin")

    keep_sockets_together()

    assert config == {"tempdir": "chosen"}
