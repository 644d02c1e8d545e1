"""The GPU's side, with a stand-in for torch.cuda: what is asked of it, and that nothing is asked too early."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpulaunch.profiler.channel.declare import read
from gpulaunch.profiler.channel.quantities import GpuMemory
from gpulaunch.profiler.probe import device
from gpulaunch.profiler.probe.device import (
    SNAPSHOT_FILE,
    accelerator_types,
    apply_gpu_memory_fraction,
    memory_of,
    watch_out_of_memory,
    write_memory,
)


class Cuda:
    """Just enough of torch.cuda: initialised late, calls queued until then."""

    def __init__(self, devices: int = 4, *, refuses: bool = False) -> None:
        self.devices = devices
        self.refuses = refuses
        self.device = 0
        self.initialized = False
        self.queued: list = []
        self.fractions: dict[int, float] = {}
        self.ooms = 0
        self.memory = self
        self.host_memory: dict[str, Any] = {"allocated_bytes": {"current": 4096, "peak": 8192}}

    def is_initialized(self) -> bool:
        return self.initialized

    def _lazy_call(self, call) -> None:
        if self.initialized:
            call()
        else:
            self.queued.append(call)

    def init(self) -> None:
        for call in self.queued:
            call()
        self.initialized = True

    def device_count(self) -> int:
        return self.devices

    def current_device(self) -> int:
        return self.device

    def set_per_process_memory_fraction(self, fraction: float, device: int) -> None:
        if self.refuses:
            raise RuntimeError("invalid fraction")
        self.device = device  # as torch 2.13 does (CUDACachingAllocator.cpp), and does not go back
        self.fractions[device] = fraction

    def _maybe_exchange_device(self, device: int) -> None:
        self.device = device

    def memory_stats_as_nested_dict(self) -> dict:
        assert self.initialized, "asking would initialise CUDA"
        return {
            "allocated_bytes": {"all": {"current": 10, "peak": 30}},
            "reserved_bytes": {"all": {"current": 64, "peak": 80}},
            "active_bytes": {"all": {"current": 12}},
            "inactive_split_bytes": {"all": {"current": 7}},
            "num_alloc_retries": 2,
            "num_ooms": self.ooms,
        }

    def host_memory_stats_as_nested_dict(self) -> dict:
        return self.host_memory

    def _dump_snapshot(self, path: str) -> None:
        with open(path, "wb") as file:
            pickle.dump({"segments": [], "ooms": self.ooms}, file)


# --- whether there is one -------------------------------------------------------------------------------------------


def torch_built_for(*, cuda: str | None = None, hip: str | None = None) -> Any:
    return SimpleNamespace(version=SimpleNamespace(cuda=cuda, hip=hip))


@pytest.mark.parametrize(
    ("torch", "files", "types"),
    [
        (torch_built_for(cuda="12.8"), {"/dev/nvidiactl"}, {"cuda"}),
        (torch_built_for(cuda="12.8"), {"/dev/dxg"}, {"cuda"}),
        (torch_built_for(hip="6.4"), {"/dev/kfd"}, {"cuda"}),
        (torch_built_for(cuda="12.8"), set(), set()),
        (torch_built_for(), {"/dev/nvidiactl"}, set()),
    ],
)
def test_an_accelerator_needs_a_driver_and_a_torch_that_can_use_it(torch, files, types):
    assert accelerator_types(torch, {}, exists=files.__contains__) == types


def test_others_may_be_named():
    named = {"GPULAUNCH_DEVICE_TYPES": "meta, xpu"}

    assert accelerator_types(torch_built_for(), named, exists=lambda _: False) == {"meta", "xpu"}


# --- the cap --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "local_rank", "capped"), [(4, "2", 2), (1, "2", 0), (4, "0", 0), (2, "3", 1)])
def test_the_cap_is_set_on_the_ranks_own_device_when_cuda_is_initialised(devices, local_rank, capped):
    cuda = Cuda(devices)
    told: list[str] = []
    environ = {"GPULAUNCH_GPU_MEMORY_FRACTION": "0.5", "LOCAL_RANK": local_rank}

    assert apply_gpu_memory_fraction(cuda, environ, told.append)
    assert cuda.fractions == {}
    cuda.init()
    assert cuda.fractions == {capped: 0.5}
    assert cuda.device == 0, "the user's default device has changed"
    assert told == []


@pytest.mark.parametrize("environ", [{}, {"GPULAUNCH_GPU_MEMORY_FRACTION": ""}])
def test_no_cap_is_queued_without_the_flag(environ):
    cuda = Cuda()

    assert not apply_gpu_memory_fraction(cuda, environ, pytest.fail)
    assert cuda.queued == []


def test_a_cap_that_cannot_be_set_is_told_and_not_raised():
    told: list[str] = []
    refusing = Cuda(refuses=True)
    apply_gpu_memory_fraction(refusing, {"GPULAUNCH_GPU_MEMORY_FRACTION": "0.5"}, told.append)
    refusing.init()
    apply_gpu_memory_fraction(Cuda(), {"GPULAUNCH_GPU_MEMORY_FRACTION": "half"}, told.append)
    apply_gpu_memory_fraction(object(), {"GPULAUNCH_GPU_MEMORY_FRACTION": "0.5"}, told.append)

    assert [why.split(":")[0] for why in told] == ["no GPU memory cap"] * 3
    assert "invalid fraction" in told[0]
    assert "half" in told[1]


def test_a_node_without_gpus_needs_no_cap():
    cuda = Cuda(devices=0)
    apply_gpu_memory_fraction(cuda, {"GPULAUNCH_GPU_MEMORY_FRACTION": "0.5"}, pytest.fail)
    cuda.init()

    assert cuda.fractions == {}


# --- memory ---------------------------------------------------------------------------------------------------------

EXPECTED = GpuMemory(
    allocated_bytes=10,
    peak_allocated_bytes=30,
    reserved_bytes=64,
    peak_reserved_bytes=80,
    active_bytes=12,
    inactive_split_bytes=7,
    alloc_retries=2,
    ooms=0,
    pinned_bytes=4096,
)


def a_page() -> memoryview:
    return memoryview(bytearray(8 * 512)).cast("Q")


def test_memory_is_read_only_once_cuda_is_in_use():
    cuda = Cuda()

    assert memory_of(cuda) is None
    cuda.init()
    assert memory_of(cuda) == EXPECTED


def test_each_figure_goes_to_its_own_word():
    cuda, words = Cuda(), a_page()
    write_memory(words, cuda)
    assert set(words) == {0}

    cuda.init()
    write_memory(words, cuda)

    assert read(GpuMemory, words) == EXPECTED
    assert sum(words) == sum(vars(EXPECTED).values())


@pytest.mark.parametrize(
    "figures", [{}, {"allocated_bytes": {}}, {"allocated_bytes": {"all": {"current": 0}}}, {"other": 1}]
)
def test_pinned_memory_that_is_not_told_is_nothing(figures):
    cuda = Cuda()
    cuda.init()
    cuda.host_memory = figures
    memory = memory_of(cuda)

    assert memory is not None
    assert memory.pinned_bytes == 0


def test_an_older_torch_tells_pinned_memory_one_level_deeper():
    cuda = Cuda()
    cuda.init()
    cuda.host_memory = {"allocated_bytes": {"all": {"current": 512}}}
    memory = memory_of(cuda)

    assert memory is not None
    assert memory.pinned_bytes == 512


# --- out of memory --------------------------------------------------------------------------------------------------


class Torch:
    """A torch whose allocator runs out of memory when it is told to."""

    def __init__(self) -> None:
        self.cuda = Cuda()
        self.observers: list = []
        self._C = SimpleNamespace(_cuda_attach_out_of_memory_observer=self.observers.append)

    def run_out(self) -> None:
        self.cuda.ooms += 1
        for observer in self.observers:
            observer(0, 1 << 30, 1 << 34, 1 << 20)


def snapshot_in(directory: Path) -> Any:
    return pickle.loads((directory / SNAPSHOT_FILE).read_bytes())


def test_when_memory_runs_out_the_allocators_state_is_saved_beside_the_error_file(tmp_path):
    torch, words = Torch(), a_page()
    assert watch_out_of_memory(torch, words, {"TORCHELASTIC_ERROR_FILE": f"{tmp_path}/error.json"}, pytest.fail)
    assert torch.observers == [], "the allocator has nobody to tell yet"
    torch.cuda.init()

    torch.run_out()

    assert snapshot_in(tmp_path)["ooms"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [SNAPSHOT_FILE]
    assert (tmp_path / SNAPSHOT_FILE).stat().st_mode & 0o777 == 0o600
    assert words[GpuMemory.ooms] == 1, "the rank may not live to the next second"


def test_a_program_that_runs_out_on_purpose_is_not_held_up_each_time(tmp_path, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(device, "monotonic", lambda: now_s)
    torch, words = Torch(), a_page()
    watch_out_of_memory(torch, words, {"TORCHELASTIC_ERROR_FILE": f"{tmp_path}/error.json"}, pytest.fail)
    torch.cuda.init()
    for _ in range(50):
        torch.run_out()
    assert snapshot_in(tmp_path)["ooms"] == 3
    assert words[GpuMemory.ooms] == 50

    now_s += 61
    torch.run_out()

    assert snapshot_in(tmp_path)["ooms"] == 51, "the one that counts may be the last"


def test_without_an_error_file_only_the_figures_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch, words = Torch(), a_page()
    watch_out_of_memory(torch, words, {}, pytest.fail)
    torch.cuda.init()
    torch.run_out()

    assert (words[GpuMemory.ooms], list(tmp_path.iterdir())) == (1, [])


def test_a_snapshot_that_cannot_be_saved_takes_no_exceptions_place(tmp_path):
    torch = Torch()
    watch_out_of_memory(torch, a_page(), {"TORCHELASTIC_ERROR_FILE": f"{tmp_path}/gone/error.json"}, pytest.fail)
    torch.cuda.init()
    torch.run_out()

    def breaks(path: str) -> None:
        raise RuntimeError("no snapshot today")

    (tmp_path / "gone").mkdir()
    torch.cuda._dump_snapshot = breaks  # type: ignore[method-assign]
    torch.run_out()

    assert list((tmp_path / "gone").iterdir()) == []


def test_a_forked_child_saves_nothing(tmp_path):
    torch, words = Torch(), a_page()
    watch_out_of_memory(torch, words, {"TORCHELASTIC_ERROR_FILE": f"{tmp_path}/error.json"}, pytest.fail)
    torch.cuda.init()
    child = os.fork()
    if child == 0:
        torch.run_out()
        os._exit(0)
    os.waitpid(child, 0)

    assert list(tmp_path.iterdir()) == []


def test_a_torch_without_observers_is_told_of():
    torch = Torch()
    del torch._C._cuda_attach_out_of_memory_observer
    told: list[str] = []
    watch_out_of_memory(torch, a_page(), {}, told.append)
    torch.cuda.init()

    assert len(told) == 1
    assert "_cuda_attach_out_of_memory_observer" in told[0]
