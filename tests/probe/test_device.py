"""The GPU's side, with a stand-in for torch.cuda: what is asked of it, and that nothing is asked too early."""

from __future__ import annotations

import pytest

from gpulaunch.profiler.probe.device import apply_gpu_memory_fraction, memory_of


class Cuda:
    """Just enough of torch.cuda: initialised late, calls queued until then."""

    def __init__(self, devices: int = 4, *, refuses: bool = False) -> None:
        self.devices = devices
        self.refuses = refuses
        self.device = 0
        self.initialized = False
        self.queued: list = []
        self.fractions: dict[int, float] = {}

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
        return {"allocated_bytes": {"all": {"current": 10, "peak": 30}}, "reserved_bytes": {"all": {"current": 64}}}


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


def test_memory_is_read_only_once_cuda_is_in_use():
    cuda = Cuda()

    assert memory_of(cuda) is None
    cuda.init()
    memory = memory_of(cuda)
    assert memory is not None
    assert (memory.allocated_bytes, memory.peak_allocated_bytes, memory.reserved_bytes) == (10, 30, 64)
