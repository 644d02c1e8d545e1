"""Which NUMA node a GPU's slot is on: asked of NVML and of the kernel, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from libnvidia import NOT_SUPPORTED, Code, Gpu, Library

from gpulaunch.profiler.samplers.nvml.gpus import GpuSampler

Gpus = Callable[..., GpuSampler]


@pytest.fixture
def root(root: Path) -> Path:
    """Two slots on two nodes."""
    for slot, node in (("0000:3b:00.0", 0), ("0000:5e:00.0", 1)):
        file = root / f"sys/bus/pci/devices/{slot}/numa_node"
        file.parent.mkdir(parents=True)
        file.write_text(f"{node}\n")
    return root


def nodes(sampler: GpuSampler, clock: Any, *, after_s: float = 1.0) -> list[int | None]:
    clock.s += after_s
    return [state.numa_node for state in sampler.read(clock()).values]


def test_every_card_and_its_instances_are_on_the_node_of_its_slot(gpus: Gpus, clock: Any) -> None:
    split = Gpu("GPU-b", slot="00000000:5E:00.0", instances={0: Gpu("MIG-b0")})
    split.answers["nvmlDeviceGetMigMode"] = pynvml.NVML_DEVICE_MIG_ENABLE
    library = Library(Gpu("GPU-a"), split)
    sampler = gpus(library)

    assert nodes(sampler, clock) == nodes(sampler, clock, after_s=60.0) == [0, 1, 1]
    assert library.asked.count("nvmlDeviceGetPciInfo_v3") == 2


def test_a_slot_that_the_machine_does_not_know_is_on_no_node(gpus: Gpus, clock: Any) -> None:
    assert nodes(gpus(Library(Gpu("GPU-a", slot="00000000:99:00.0"))), clock) == [None]


def test_a_card_that_cannot_say_is_not_asked_again_and_is_no_trouble(gpus: Gpus, clock: Any) -> None:
    library = Library(Gpu("GPU-a", slot=NOT_SUPPORTED))
    sampler = gpus(library)

    assert sampler.read(clock()).errors == ()
    assert nodes(sampler, clock, after_s=60.0) == [None]
    assert library.asked.count("nvmlDeviceGetPciInfo_v3") == 1


def test_a_card_that_fails_once_is_asked_again(gpus: Gpus, clock: Any) -> None:
    gpu = Gpu("GPU-a", slot=Code(pynvml.NVML_ERROR_UNKNOWN))
    sampler = gpus(Library(gpu))
    (told,) = sampler.read(clock()).errors
    gpu.slot = "00000000:3B:00.0"

    assert told.startswith("GPU 0: ")
    assert nodes(sampler, clock, after_s=11.0) == [0]
