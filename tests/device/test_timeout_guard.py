"""Readings that do not come back: what is told meanwhile, and that no second one is made."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from libnvidia import GIB, Gpu, Library

from gpulaunch.profiler.record import Reading
from gpulaunch.profiler.samplers.nvml.gpus import GpuSampler
from gpulaunch.profiler.samplers.nvml.timeout_guard import Helper, TimeoutGuard

BOUND_S = 30.0
SHORT_S = 0.01
Gpus = Callable[..., GpuSampler]


class Source:
    """A sampler that counts its readings, and stands before its gate while that is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.readings = 0
        self.error: BaseException | None = None

    def read(self, now: float) -> Reading[int]:
        self.readings += 1
        assert self.gate.wait(BOUND_S)
        if self.error is not None:
            raise self.error
        return Reading(values=self.readings)


@pytest.fixture
def source(helper: Helper) -> Iterator[Source]:
    source = Source()
    yield source
    source.gate.set()


def patiently(source: Source, helper: Helper) -> TimeoutGuard[int]:
    return TimeoutGuard(source, helper, what="NVML", nothing=0, patience_s=BOUND_S)


def hang(sampler: TimeoutGuard[Any], gate: threading.Event) -> None:
    """From now on it does not come back, and a test does not wait long for it."""
    gate.clear()
    sampler.patience_s = SHORT_S


def come_back(sampler: TimeoutGuard[Any], gate: threading.Event, helper: Helper) -> None:
    gate.set()
    sampler.patience_s = BOUND_S
    until_s = time.monotonic() + BOUND_S
    while helper.busy_s() is not None:
        assert time.monotonic() < until_s, "it does not come back"
        time.sleep(0.001)


def test_what_comes_in_time_is_given_as_it_came(source: Source, helper: Helper, clock: Any) -> None:
    sampler = patiently(source, helper)
    assert [sampler.read(clock()) for _ in range(3)] == [Reading(values=value) for value in (1, 2, 3)]


def test_what_is_late_is_told_with_its_age_and_nobody_asks_twice(source: Source, helper: Helper, clock: Any) -> None:
    sampler = patiently(source, helper)
    sampler.read(clock())
    hang(sampler, source.gate)
    told: list[Reading[int]] = []
    for _ in range(4):
        clock.s += 4
        told.append(sampler.read(clock()))

    assert [reading.values for reading in told] == [1, 1, 1, 1]
    assert [reading.late_s for reading in told] == [4, 8, 12, 16]
    assert [reading.errors for reading in told] == [(f"NVML has not answered for {s:.1f} s",) for s in (0, 4, 8, 12)]
    assert [bool(reading.absent) for reading in told] == [False, False, True, True]
    assert source.readings == 2


def test_before_the_first_answer_there_is_nothing(source: Source, helper: Helper, clock: Any) -> None:
    sampler = patiently(source, helper)
    hang(sampler, source.gate)
    first = sampler.read(clock())
    clock.s += 10
    second = sampler.read(clock())

    assert (first.values, first.absent) == (0, "")
    assert (second.values, second.absent) == (0, "NVML has not answered for 10.0 s")


def test_an_answer_that_comes_late_counts(source: Source, helper: Helper, clock: Any) -> None:
    """A source that always takes a little too long is still read, one reading behind."""
    sampler = patiently(source, helper)
    hang(sampler, source.gate)
    sampler.read(clock())
    come_back(sampler, source.gate, helper)
    hang(sampler, source.gate)
    clock.s += 1
    late = sampler.read(clock())
    assert (late.values, late.late_s) == (1, 1)

    come_back(sampler, source.gate, helper)
    assert sampler.read(clock()) == Reading(values=3)


def test_two_samplers_have_one_call_between_them(source: Source, helper: Helper, clock: Any) -> None:
    """While one of them hangs the other one is not asked, and is told to be waiting too."""
    other = Source()
    first, second = patiently(source, helper), patiently(other, helper)
    second.read(clock())
    threads = threading.active_count()
    hang(first, source.gate)
    first.read(clock())
    clock.s += 3
    told = second.read(clock())

    assert (told.values, told.late_s, other.readings) == (1, 3, 1)
    assert told.errors == ("NVML has not answered for 3.0 s",)
    assert threading.active_count() == threads


def test_what_a_reading_raises_is_raised_where_it_was_asked_for(source: Source, helper: Helper, clock: Any) -> None:
    sampler = patiently(source, helper)
    source.error = ZeroDivisionError("of ours")
    with pytest.raises(ZeroDivisionError):
        sampler.read(clock())
    source.error = None

    assert sampler.read(clock()).values == 2


def test_a_helper_that_is_closed_has_no_thread(source: Source, helper: Helper, clock: Any) -> None:
    before = threading.active_count()
    patiently(source, helper).read(clock())
    assert threading.active_count() == before + 1
    helper.close()
    assert threading.active_count() == before


def test_a_helper_that_hangs_is_left_behind(source: Source, helper: Helper, clock: Any) -> None:
    sampler = patiently(source, helper)
    hang(sampler, source.gate)
    sampler.read(clock())
    helper.close()  # comes back, though the call does not

    assert helper.busy_s() == 0


def test_a_process_ends_although_a_call_of_its_hangs_in_c() -> None:
    """Nothing waits for it: not the thread that goes on meanwhile, not the end of the interpreter."""
    program = """
import ctypes
from gpulaunch.profiler.samplers.nvml.timeout_guard import Helper
helper = Helper()
call = helper.start(lambda: ctypes.CDLL(None).sleep(600))
assert not call.is_back(0.1) and helper.busy_s() is not None
helper.close()
print("goes on")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)

    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")


# -- the same with NVML


def test_an_nvml_that_hangs_leaves_what_is_lasting_and_comes_back(gpus: Gpus, helper: Helper, clock: Any) -> None:
    gpu = Gpu("GPU-a")
    library = Library(gpu)
    sampler = gpus(library)
    sampler.read(clock())
    library.gates["nvmlDeviceGetClockInfo"] = gate = threading.Event()
    hang(sampler.guard, gate)
    gpu.fields[83] += 5_000_000
    clock.s += 3
    young = sampler.read(clock())
    assert library.entered.wait(BOUND_S)
    asked = len(library.asked)
    clock.s += 9
    old = sampler.read(clock())

    (state,) = young.values
    assert (state.age_s, state.temperature_celsius, young.absent) == (3, 61, "")
    (state,) = old.values
    assert (state.age_s, state.temperature_celsius, state.memory_total_bytes) == (12, None, 139 * GIB)
    assert old.absent == "NVML has not answered for 9.0 s"
    assert len(library.asked) == asked

    come_back(sampler.guard, gate, helper)
    clock.s += 1
    reading = sampler.read(clock())
    (state,) = reading.values
    assert (reading.errors, state.age_s, state.temperature_celsius, state.energy_joules) == ((), 0, 61, 5000)


def test_an_nvml_that_hangs_from_the_beginning_holds_up_nobody(gpus: Gpus, clock: Any) -> None:
    library = Library(Gpu("GPU-a"))
    library.gates["nvmlInitWithFlags"] = threading.Event()
    sampler = gpus(library, patience_s=SHORT_S)
    first = sampler.read(clock())
    assert library.entered.wait(BOUND_S)
    clock.s += 20
    second = sampler.read(clock())

    assert first.values == second.values == ()
    assert (first.absent, second.absent) == ("", "NVML has not answered for 20.0 s")
    assert library.asked == ["nvmlInitWithFlags"]
