"""What is read of a GPU through the real binding, from a stand-in for NVIDIA's library (see libnvidia.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from libnvidia import GIB, NOT_SUPPORTED, Code, Gpu, Library, binding

from gpulaunch.profiler.record import THROTTLE_REASONS, GpuState
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.nvml.gpus import GpuSampler
from gpulaunch.profiler.samplers.nvml.timeout_guard import Helper

MIB = 1 << 20
Gpus = Callable[..., GpuSampler]
CODES = sorted({value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")})


def codes(*names: str) -> set[int]:
    """By name, as many as the binding knows."""
    return {getattr(pynvml, f"NVML_ERROR_{name}") for name in names if hasattr(pynvml, f"NVML_ERROR_{name}")}


FINAL = codes(
    *("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "INVALID_ARGUMENT", "NO_PERMISSION"),
    *("VGPU_ECC_NOT_SUPPORTED", "DEPRECATED", "ARGUMENT_VERSION_MISMATCH"),
)
LOSING = codes("GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND", "DRIVER_NOT_LOADED")


def one(sampler: GpuSampler, clock: Any, *, after_s: float = 1.0) -> GpuState:
    """The only GPU, some time later, in a reading without trouble."""
    clock.s += after_s
    reading = sampler.read(clock())
    assert (reading.absent, reading.errors) == ("", ())
    (state,) = reading.values
    return state


def test_everything_that_a_card_says(gpus: Gpus, clock: Any) -> None:
    gpu = Gpu("GPU-a")
    sampler = gpus(Library(gpu))
    one(sampler, clock)
    gpu.fields |= {83: 7_000_000_000 + 6_500_000, 94: 2, 197: 5 * GIB + 300, 198: 9 * GIB + 4000, 138: 8, 139: 16}
    gpu.fields |= {74: 250_000_000, 75: 10_000_000, 3: 4, 4: 1, 142: 2, 143: 1, 144: 1}
    gpu.answers["nvmlDeviceGetCurrentClocksEventReasons"] = pynvml.nvmlClocksEventReasonSwPowerCap

    assert one(sampler, clock, after_s=10.0) == GpuState(
        index=0,
        uuid="GPU-a",
        parent_uuid=None,
        model="NVIDIA H200",
        utilization_ratio=0.97,
        memory_used_bytes=40 * GIB,
        memory_total_bytes=139 * GIB,
        sm_clock_hertz=1_980_000_000,
        power_watts=650.5,
        energy_joules=6500,
        temperature_celsius=61,
        throttled_by=("power_cap",),
        throttle_seconds=dict.fromkeys(THROTTLE_REASONS, 0.0) | {"power_cap": 0.25, "thermal": 0.01},
        pcie_bytes={"receive": 4000, "transmit": 300},
        pcie_generation=5,
        pcie_generation_max=5,
        pcie_width=16,
        pcie_width_max=16,
        pcie_replays=2,
        nvlink_bytes={"receive": 16 * 1024, "transmit": 8 * 1024},
        ecc_errors={"corrected": 4, "uncorrected": 1},
        remapped_rows={"correctable": 2, "uncorrectable": 1},
        remap_pending=True,
        remap_failed=False,
        gpm_ratios={
            "sm_active": 0.88,
            "sm_occupancy": 0.425,
            "tensor_active": 0.61,
            "dram_active": 0.33,
            "fp64_active": 0.0,
            "fp32_active": 0.07,
            "fp16_active": 0.01,
        },
    )


def test_a_card_that_can_say_nothing_is_there_and_all_is_unknown(gpus: Gpus, clock: Any) -> None:
    bare = Gpu("GPU-a", answers={}, fields={}, gpm=None)
    library = Library(bare)
    sampler = gpus(library)
    first = sampler.read(clock())
    asked = len(library.asked)
    clock.s += 60
    second = sampler.read(clock())

    assert first.values == second.values == (GpuState(index=0, uuid="GPU-a", parent_uuid=None, model="NVIDIA H200"),)
    (told,) = first.errors
    assert told.startswith("GPU 0: cannot say: ")
    assert second.errors == ()
    assert library.asked[asked:] == ["nvmlDeviceGetMigMode"]


def test_an_older_driver_and_an_older_card_are_asked_the_older_way(gpus: Gpus, clock: Any) -> None:
    gpu = Gpu("GPU-a")
    gpu.fields[186] = NOT_SUPPORTED
    gpu.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    library = Library(gpu)
    library.lacks = {"nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksEventReasons"}
    sampler = gpus(library)
    (state,) = sampler.read(clock()).values

    assert (state.temperature_celsius, state.power_watts, state.throttled_by) == (61, 640, ("hw_thermal",))


def test_a_binding_that_is_older_than_the_questions_is_no_trouble(helper: Helper, root: Path, clock: Any) -> None:
    names = vars(binding(Library(Gpu("GPU-a"))))
    lacks = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetUtilizationRates", "nvmlGpmQueryDeviceSupport", "NVML_CLOCK_SM")
    older = SimpleNamespace(**{name: value for name, value in names.items() if name not in lacks})
    sampler = GpuSampler(MonotonicTotals(), helper, nvml=lambda: older, root=root, patience_s=30.0)
    first = sampler.read(clock())
    (state,) = first.values

    assert first.errors == ("GPU 0: cannot say: GPM, clock, utilization",)
    assert (state.temperature_celsius, state.utilization_ratio, state.sm_clock_hertz) == (61, None, None)
    one(sampler, clock)


def test_the_call_that_blocks_for_20_ms_is_never_made(gpus: Gpus, clock: Any) -> None:
    library = Library(Gpu("GPU-a"))
    sampler = gpus(library)
    for _ in range(3):
        one(sampler, clock, after_s=11.0)

    assert "nvmlDeviceGetPcieThroughput" not in library.asked


# -- every error code


@pytest.mark.parametrize("code", CODES)
def test_a_call_that_fails_takes_nothing_else_with_it(gpus: Gpus, clock: Any, code: int) -> None:
    """What will never work is told once; what may work next time is told each time; a lost card is left alone."""
    gpu = Gpu("GPU-a")
    gpu.answers["nvmlDeviceGetClockInfo"] = Code(code)
    library = Library(gpu)
    sampler = gpus(library)
    first = sampler.read(clock())
    clock.s += 1
    second = sampler.read(clock())

    for reading in (first, second):
        (state,) = reading.values
        assert state.sm_clock_hertz is None
        assert state.memory_used_bytes == (None if code in LOSING else 40 * GIB)
        assert state.temperature_celsius == (None if code in LOSING else 61)
    assert len(first.errors) == 1
    assert len(second.errors) == (0 if code in FINAL else 1)
    assert library.asked.count("nvmlDeviceGetClockInfo") == (1 if code in FINAL | LOSING else 2)


@pytest.mark.parametrize("code", CODES)
def test_a_field_that_fails_takes_no_other_with_it(gpus: Gpus, clock: Any, code: int) -> None:
    gpu = Gpu("GPU-a")
    gpu.fields |= {83: Code(code), 74: Code(code)}
    sampler = gpus(Library(gpu))
    first = sampler.read(clock())
    clock.s += 10
    second = sampler.read(clock())

    for reading in (first, second):
        (state,) = reading.values
        assert state.energy_joules is None
        assert state.power_watts == (None if code in LOSING else 650.5)
        assert "thermal" in state.throttle_seconds or code in LOSING
    assert len(first.errors) == (1 if code in FINAL | LOSING else 2)
    assert (second.errors == ()) == (code in FINAL)


@pytest.mark.parametrize("code", CODES)
def test_a_batch_that_fails_leaves_what_is_asked_by_itself(gpus: Gpus, clock: Any, code: int) -> None:
    gpu = Gpu("GPU-a")
    gpu.answers["nvmlDeviceGetFieldValues"] = Code(code)
    (state,) = gpus(Library(gpu)).read(clock()).values

    assert state.ecc_errors == {}
    assert state.temperature_celsius == (None if code in LOSING else 61)


@pytest.mark.parametrize("code", CODES)
def test_an_nvml_that_cannot_be_opened_is_absent(gpus: Gpus, clock: Any, code: int) -> None:
    library = Library(Gpu("GPU-a"))
    library.initialised = Code(code)
    sampler = gpus(library)
    first, second = sampler.read(clock()), sampler.read(clock())

    assert (first.values, first.errors) == ((), ())
    assert first.absent == second.absent
    assert first.absent.startswith("no NVML: ")
    assert library.asked.count("nvmlInitWithFlags") == 1


def test_a_lost_card_hides_no_other_and_is_there_again_when_it_is_back(gpus: Gpus, clock: Any) -> None:
    lost, well = Gpu("GPU-a"), Gpu("GPU-b")
    library = Library(lost, well)
    sampler = gpus(library)
    sampler.read(clock())
    lost.lost = True
    clock.s += 1
    reading = sampler.read(clock())
    assert reading.errors == ("GPU 0: GPU is lost",)
    assert [state.temperature_celsius for state in reading.values] == [None, 61]

    clock.s += 5
    asked = len(library.asked)
    assert sampler.read(clock()).errors == ("GPU 0: still lost",)
    asked_of_one = len(library.asked) - asked
    lost.lost = False
    clock.s += 10
    asked = len(library.asked)
    reading = sampler.read(clock())

    assert reading.errors == ()
    assert [state.temperature_celsius for state in reading.values] == [61, 61]
    assert len(library.asked) - asked > 2 * asked_of_one


def test_a_card_that_is_lost_from_the_beginning_is_found_when_it_is_back(gpus: Gpus, clock: Any) -> None:
    lost = Gpu("GPU-a", lost=True)
    sampler = gpus(Library(lost, Gpu("GPU-b")))
    reading = sampler.read(clock())
    assert [state.uuid for state in reading.values] == ["GPU-b"]
    assert reading.errors == ("GPU 0: GPU is lost",)

    lost.lost = False
    clock.s += 10
    assert [(state.index, state.uuid) for state in sampler.read(clock()).values] == [(0, "GPU-a"), (1, "GPU-b")]


# -- totals


def test_totals_begin_with_the_run_and_go_on_in_the_next_sidecar(gpus: Gpus, clock: Any, tmp_path: Path) -> None:
    gpu = Gpu("GPU-a")
    library = Library(gpu)
    ledger = MonotonicTotals()
    sampler = gpus(library, ledger)
    assert one(sampler, clock).energy_joules == 0
    gpu.fields |= {83: 7_000_000_000 + 1_000_000, 198: 9 * GIB + 70}
    one(sampler, clock, after_s=10.0)
    ledger.save(tmp_path / "sidecar.json")

    gpu.fields |= {83: 7_000_000_000 + 2_000_000, 198: 9 * GIB + 1000}  # while nobody looked
    again = MonotonicTotals()
    again.load(tmp_path / "sidecar.json")
    sampler = gpus(library, again)
    state = one(sampler, clock)
    assert (state.energy_joules, state.pcie_bytes["receive"]) == (1000, 70)
    gpu.fields |= {83: 7_000_000_000 + 2_500_000, 198: 9 * GIB + 1001}
    state = one(sampler, clock, after_s=10.0)
    assert (state.energy_joules, state.pcie_bytes["receive"]) == (1500, 71)


def test_a_counter_that_fails_once_stands_still(gpus: Gpus, clock: Any) -> None:
    gpu = Gpu("GPU-a")
    sampler = gpus(Library(gpu))
    one(sampler, clock)
    gpu.fields |= {198: 9 * GIB + 70, 74: 5_000_000}
    one(sampler, clock)
    gpu.fields |= {198: Code(pynvml.NVML_ERROR_UNKNOWN), 74: Code(pynvml.NVML_ERROR_UNKNOWN)}
    clock.s += 1
    (state,) = sampler.read(clock()).values

    assert (state.pcie_bytes["receive"], state.throttle_seconds["power_cap"]) == (70, 0.005)


def test_a_reason_that_the_card_does_not_count_is_sampled(gpus: Gpus, clock: Any) -> None:
    """A hardware slowdown counts for the seconds between readings at which it held; not before, not over a gap."""
    gpu = Gpu("GPU-a")
    gpu.fields |= {75: NOT_SUPPORTED}
    bits = pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown | pynvml.nvmlClocksEventReasonSwThermalSlowdown
    gpu.answers["nvmlDeviceGetCurrentClocksEventReasons"] = bits
    sampler = gpus(Library(gpu))
    sampler.read(clock())
    one(sampler, clock)
    state = one(sampler, clock, after_s=2.0)
    assert {reason: s for reason, s in state.throttle_seconds.items() if s} == {"hw_power_brake": 3.0, "thermal": 3.0}

    gpu.answers["nvmlDeviceGetCurrentClocksEventReasons"] = 0
    assert one(sampler, clock).throttle_seconds["thermal"] == 3.0
    gpu.answers["nvmlDeviceGetCurrentClocksEventReasons"] = bits
    assert one(sampler, clock, after_s=60.0).throttle_seconds["thermal"] == 3.0


def test_where_the_counter_may_have_wrapped_unseen_gpm_stands_in(gpus: Gpus, clock: Any) -> None:
    gpu = Gpu("GPU-a")
    gpu.fields |= {197: 1000, 198: 2000}
    sampler = gpus(Library(gpu))
    one(sampler, clock)
    gpu.fields |= {197: 10, 198: 3000}

    assert one(sampler, clock, after_s=2.0).pcie_bytes == {"receive": 400 * MIB, "transmit": 200 * MIB}


def test_without_gpm_what_may_have_wrapped_unseen_is_not_known(gpus: Gpus, clock: Any) -> None:
    gpu = Gpu("GPU-a", gpm=None)
    gpu.fields |= {197: 1000, 198: 2000}
    sampler = gpus(Library(gpu))
    sampler.read(clock())
    gpu.fields |= {197: 10, 198: 3000}

    assert one(sampler, clock).pcie_bytes == {}


def test_what_gpm_saw_is_no_total_any_more_when_gpm_is_gone(gpus: Gpus, clock: Any) -> None:
    gpu = Gpu("GPU-a")
    gpu.fields |= {197: 1000, 198: 2000}
    sampler = gpus(Library(gpu))
    one(sampler, clock)
    one(sampler, clock)
    gpu.gpm = None
    clock.s += 1

    assert sampler.read(clock()).values[0].pcie_bytes == {}


def test_a_link_that_is_slow_enough_can_be_followed_over_a_wrap(gpus: Gpus, clock: Any) -> None:
    gpu = Gpu("GPU-a", gpm=None)
    gpu.answers |= {"nvmlDeviceGetMaxPcieLinkGeneration": 3, "nvmlDeviceGetMaxPcieLinkWidth": 4}
    gpu.fields |= {197: (1 << 32) - 100, 198: 5}
    sampler = gpus(Library(gpu))
    sampler.read(clock())
    gpu.fields |= {197: 900, 198: 6}

    assert one(sampler, clock).pcie_bytes == {"receive": 1, "transmit": 1000}


def test_nvlink_without_counters_is_what_gpm_saw_and_absent_where_it_saw_nothing(gpus: Gpus, clock: Any) -> None:
    gpu = Gpu("GPU-a")
    gpu.fields |= {138: NOT_SUPPORTED, 139: NOT_SUPPORTED}
    sampler = gpus(Library(gpu))
    sampler.read(clock())
    assert one(sampler, clock).nvlink_bytes == {}

    assert gpu.gpm is not None
    gpu.gpm |= {60: 30.0, 61: 20.0}
    assert one(sampler, clock).nvlink_bytes == {"receive": 30 * MIB, "transmit": 20 * MIB}


# -- nodes without GPUs


def test_without_a_driver_nothing_is_loaded_and_no_thread_started(helper: Helper, tmp_path: Path, clock: Any) -> None:
    threads = threading.active_count()
    sampler = GpuSampler(MonotonicTotals(), helper, nvml=lambda: pytest.fail("loaded"), root=tmp_path)
    reading = sampler.read(clock())

    assert (reading.values, reading.absent) == ((), "no NVIDIA driver on this node")
    assert threading.active_count() == threads


def test_a_driver_that_shows_no_gpu_is_told(gpus: Gpus, clock: Any) -> None:
    assert gpus(Library()).read(clock()).absent == "NVML shows no GPU"


def real_gpus() -> int:
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def test_the_real_library_is_asked_or_refuses(root: Path) -> None:
    helper = Helper()
    sampler = GpuSampler(MonotonicTotals(), helper, root=root, patience_s=60.0)
    reading = sampler.read(helper.clock())
    helper.close()

    if real_gpus():
        assert {state.uuid[:4] for state in reading.values} <= {"GPU-", "MIG-"}
        assert all(state.memory_total_bytes for state in reading.values)
    else:
        assert reading.values == ()
        assert reading.absent.startswith("no NVML: ")
