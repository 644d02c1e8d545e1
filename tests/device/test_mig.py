"""MIG instances: what they say by themselves, and what only their card does; from a stand-in (see libnvidia.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pynvml
from libnvidia import GIB, NOT_SUPPORTED, Gpu, Library

from gpulaunch.exporters.prometheus.values import Facts, families
from gpulaunch.profiler.record import NodeState
from gpulaunch.profiler.samplers.nvml.gpus import GpuSampler, lasting

Gpus = Callable[..., GpuSampler]


def an_instance(uuid: str, number: int, *, busy: float) -> Gpu:
    answers: dict[str, Any] = {
        "nvmlDeviceGetMemoryInfo": (GIB, 16 * GIB),
        "nvmlDeviceGetGpuInstanceId": number,
        "nvmlDeviceGetComputeInstanceId": 0,
    }
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


def test_no_metric_calls_an_instance_by_its_uuid(gpus: Gpus, clock: Any, node: NodeState) -> None:
    """Two GPU instances, one of them divided further. What was read too long ago keeps its name."""
    second = an_instance("MIG-y", 7, busy=75)
    second.answers["nvmlDeviceGetComputeInstanceId"] = 1
    card = Gpu("GPU-a", instances={0: an_instance("MIG-x", 7, busy=50), 1: second, 2: an_instance("MIG-z", 0, busy=5)})
    card.answers["nvmlDeviceGetMigMode"] = pynvml.NVML_DEVICE_MIG_ENABLE
    sampler = gpus(Library(card))
    devices = sampler.read(clock()).values

    page = families(replace(node, devices=devices), Facts(version="1")).collect()
    samples = [sample for family in page for sample in family.samples]

    infos = [sample.labels for sample in samples if sample.name == "gpulaunch_gpu_info"]
    assert {labels["gpu"]: labels["uuid"] for labels in infos} == {
        "0": "GPU-a",
        "0.7": "MIG-x",
        "0.7.1": "MIG-y",
        "0.0": "MIG-z",
    }
    of_uuids = [s.name for s in samples if any("MIG-" in value for value in s.labels.values())]
    assert set(of_uuids) == {"gpulaunch_gpu_info"}
    assert any(s.labels == {"gpu": "0.7.1", "state": "used"} for s in samples)
    assert [lasting(state).label for state in devices] == [state.label for state in devices]


def test_instances_that_are_made_anew_are_others(gpus: Gpus, clock: Any) -> None:
    """In place of one that is gone another one stands, under the same name; the buffers of the one that is gone are
    given back."""
    card = Gpu("GPU-a", instances={0: an_instance("MIG-x", 7, busy=50)})
    card.answers["nvmlDeviceGetMigMode"] = pynvml.NVML_DEVICE_MIG_ENABLE
    library = Library(card)
    sampler = gpus(library)
    before = sampler.read(clock())
    buffers = len(library.samples)
    card.instances = {0: an_instance("MIG-z", 7, busy=10)}
    clock.s += 10
    reading = sampler.read(clock())

    assert [state.uuid for state in reading.values] == ["GPU-a", "MIG-z"]
    assert [state.label for state in reading.values] == [state.label for state in before.values] == ["0", "0.7"]
    assert reading.values[1].gpm_ratios == {}
    assert len(library.samples) == buffers
