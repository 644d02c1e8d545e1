from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gpulaunch.launcher.job.host_info import Gpu, HostInfo
from gpulaunch.launcher.job.load import load
from gpulaunch.launcher.job.spec import Request


def _gpu(index: int) -> Gpu:
    return Gpu(
        index=index,
        uuid=f"GPU-{index:08x}-aaaa",
        name="NVIDIA H200",
        memory_bytes=139 << 30,
        pci_bus_id=f"0000:{0x10 + index:02x}:00.0",
    )


def _host(*, cores: int = 8, gpus: int | tuple[Gpu, ...] = 0, root: str = "/") -> HostInfo:
    found = tuple(_gpu(i) for i in range(gpus)) if isinstance(gpus, int) else gpus
    return HostInfo(
        cores=cores,
        cores_why=f"all {cores}",
        gpus=found,
        gpus_why=f"{len(found)} through NVML" if found else "no NVIDIA driver",
        launched_by="one host",
        hostname="node7",
        memory_limit_bytes=None,
        memory_why="no cgroup limit",
        root=root,
    )


@pytest.fixture
def gpu() -> Callable[[int], Gpu]:
    """Makes a GPU with this index."""
    return _gpu


@pytest.fixture
def make_host() -> Callable[..., HostInfo]:
    """Makes a machine: 8 cores, no GPU, unless told otherwise."""
    return _host


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """We are in a directory of our own, and there is a script train.py in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


@pytest.fixture
def job(script: str) -> Callable[..., Request]:
    """Loads `gpulaunch <words> train.py` on such a machine."""

    def run(
        *words: str, environ: Mapping[str, str] | None = None, on: HostInfo | None = None, program: bool = True
    ) -> Request:
        return load([*words, *([script] if program else [])], environ or {}, on or _host())

    return run
