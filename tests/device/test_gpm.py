"""The insides of a GPU, from two samples of its counters; through the real binding (see libnvidia.py)."""

from __future__ import annotations

from typing import Any

import pytest
from libnvidia import NOT_SUPPORTED, Gpu, Library, binding

from gpulaunch.profiler.samplers.nvml.gpm import Gpm

MIB = 1 << 20


class Counters:
    """One GPU's, opened."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.gpu = Gpu("GPU-a", gpm={2: 80.0, 5: 40.0, 20: 10.0, 21: 20.0})
        self.library = Library(self.gpu)
        nvml = self.nvml = binding(self.library)
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        self.gpm = Gpm(nvml, lambda buffer: nvml.nvmlGpmSampleGet(handle, buffer), clock=clock)
        self.gpm.open()

    def read(self, after_s: float) -> dict[str, float]:
        self.clock.s += after_s
        self.gpm.read()
        return dict(self.gpm.ratios)


@pytest.fixture
def counters(clock: Any) -> Counters:
    return Counters(clock)


def test_the_first_sample_is_compared_with_nothing(counters: Counters) -> None:
    assert counters.gpm.ratios == {}
    assert counters.gpm.moved_bytes("pcie_receive") is None


def test_ratios_are_of_the_time_between_two_samples(counters: Counters) -> None:
    assert counters.read(1.0) == {"sm_active": 0.8, "tensor_active": 0.4}
    assert counters.gpu.gpm is not None
    counters.gpu.gpm[2] = 20.0
    assert counters.read(1.0) == {"sm_active": 0.2, "tensor_active": 0.4}


def test_rates_are_summed_up_over_their_windows(counters: Counters) -> None:
    counters.read(2.0)
    counters.read(0.5)

    assert counters.gpm.moved_bytes("pcie_receive") == 50 * MIB
    assert counters.gpm.moved_bytes("pcie_transmit") == 25 * MIB
    assert counters.gpm.moved_bytes("nvlink_receive") is None


def test_samples_that_lie_too_close_are_not_taken(counters: Counters) -> None:
    """A window that is shorter than the counters' own would show 0; what passes is in the next window."""
    before = counters.read(1.0)
    asked = len(counters.library.asked)
    assert counters.read(0.1) == before
    assert len(counters.library.asked) == asked

    counters.read(0.4)
    assert counters.gpm.moved_bytes("pcie_receive") == 30 * MIB


def test_a_window_that_nobody_looked_at_tells_nothing(counters: Counters) -> None:
    counters.read(1.0)
    assert counters.read(60.0) == {}
    assert counters.gpm.moved_bytes("pcie_receive") == 20 * MIB
    assert counters.read(1.0) == {"sm_active": 0.8, "tensor_active": 0.4}


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0, NOT_SUPPORTED])
def test_a_metric_that_makes_no_sense_is_not_there(counters: Counters, nonsense: Any) -> None:
    assert counters.gpu.gpm is not None
    counters.gpu.gpm[2] = nonsense

    assert counters.read(1.0) == {"tensor_active": 0.4}


def test_a_little_more_than_all_is_all(counters: Counters) -> None:
    assert counters.gpu.gpm is not None
    counters.gpu.gpm[2] = 100.4

    assert counters.read(1.0)["sm_active"] == 1.0


def test_a_sample_that_fails_passes_its_error_and_leaves_nothing_stale(counters: Counters) -> None:
    counters.read(1.0)
    counters.gpu.lost = True
    with pytest.raises(counters.nvml.NVMLError, match="GPU is lost"):
        counters.read(1.0)
    assert counters.gpm.ratios == {}

    counters.gpu.lost = False
    assert counters.read(1.0) == {"sm_active": 0.8, "tensor_active": 0.4}
    assert counters.gpm.moved_bytes("pcie_receive") == 60 * MIB


def test_closed_it_leaves_no_buffer(counters: Counters) -> None:
    assert len(counters.library.samples) == 2
    counters.gpm.close()
    counters.gpm.close()
    assert counters.library.samples == {}
