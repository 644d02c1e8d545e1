"""MIG instances: what they say by themselves, and what only their card does; from a stand-in (see libnvidia.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml
from libnvidia import GIB, NOT_SUPPORTED, Gpu, Library

from gpulaunch.profiler.samplers.gpus import GpuSampler

Gpus = Callable[..., GpuSampler]


def an_instance(uuid: str, number: int, *, busy: float) -> Gpu:
    answers: dict[str, Any] = {"nvmlDeviceGetMemoryInfo": (GIB, 16 * GIB), "nvmlDeviceGetGpuInstanceId": number}
    return Gpu(uuid, name="NVIDIA H200 MIG 1g.18gb", answers=answers, fields={}, gpm={2: busy})


def test_mig_instances_have_their_own_memory_and_insides(gpus: Gpus, clock: Any) -> None:
    instances = {0: an_instance("MIG-x", 7, busy=50), 3: an_instance("MIG-y", 9, busy=75)}
    card = Gpu("GPU-a", gpm={}, instances=instances)
    card.answers["nvmlDeviceGetMigMode"] = pynvml.NVML_DEVICE_MIG_ENABLE
    card.answers["nvmlDeviceGetUtilizationRates"] = NOT_SUPPORTED
    sampler = gpus(Library(card, Gpu("GPU-b")))
    sampler.read(clock())
    clock.s += 1
    reading = sampler.read(clock())
    whole, left, right, other = reading.values

    assert reading.errors == ()
    assert [(state.index, state.uuid, state.parent_uuid) for state in (whole, left, right, other)] == [
        (0, "GPU-a", None),
        (0, "MIG-x", "GPU-a"),
        (0, "MIG-y", "GPU-a"),
        (1, "GPU-b", None),
    ]
    assert (whole.utilization_ratio, whole.power_watts, whole.memory_total_bytes) == (None, 650.5, 139 * GIB)
    assert [state.gpm_ratios for state in (left, right)] == [{"sm_active": 0.5}, {"sm_active": 0.75}]
    assert (left.memory_total_bytes, left.power_watts, left.model) == (16 * GIB, None, "NVIDIA H200 MIG 1g.18gb")


def test_instances_that_are_made_anew_are_others(gpus: Gpus, clock: Any) -> None:
    """In place of one that is gone another one stands; the buffers of the one that is gone are given back."""
    card = Gpu("GPU-a", instances={0: an_instance("MIG-x", 7, busy=50)})
    card.answers["nvmlDeviceGetMigMode"] = pynvml.NVML_DEVICE_MIG_ENABLE
    library = Library(card)
    sampler = gpus(library)
    sampler.read(clock())
    buffers = len(library.samples)
    card.instances = {0: an_instance("MIG-z", 7, busy=10)}
    clock.s += 10
    reading = sampler.read(clock())

    assert [state.uuid for state in reading.values] == ["GPU-a", "MIG-z"]
    assert reading.values[1].gpm_ratios == {}
    assert len(library.samples) == buffers
