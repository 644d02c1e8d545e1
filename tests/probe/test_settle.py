"""What being observed has cost so far, as the taps' own clock says: a probe and a clock that the test turns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulaunch.profiler.channel import segment_writer
from gpulaunch.profiler.channel.layout import REGION_BITS, Region
from gpulaunch.profiler.probe import cost, observed
from gpulaunch.profiler.probe.account import OTHER
from gpulaunch.profiler.probe.cost import Cost, time_call
from gpulaunch.profiler.probe.state import Probe

TORCH = SimpleNamespace(Tensor=type("Tensor", (), {}), cuda=SimpleNamespace(is_initialized=lambda: False))
US = 1_000
STEPS = 64 * 64


class Turned:
    """A clock."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Turned:
    clock = Turned()
    for module in (cost, observed):
        monkeypatch.setattr(module, "monotonic_ns", clock)
    return clock


@pytest.fixture
def probe(clock: Turned, tmp_path: Path) -> Probe:
    path = str(tmp_path / "rank-0.bin")
    segment_writer.create(path, rank=0, local_rank=0, attempt=0)
    return Probe(segment_writer.SegmentWriter(path), TORCH)


@pytest.mark.parametrize("dear", range(8))
def test_what_is_done_every_eight_steps_is_measured_as_often(probe: Probe, clock: Turned, dear: int) -> None:
    """Timing on the GPU is such a thing: each figure stands for the mean of its group, wherever in it that lies."""
    spent_ns = 0
    for step in range(STEPS):
        clock.now_ns += 1_000 * US
        began_ns = clock.now_ns
        cost_ns = 100 * US if step % 8 == dear else 10 * US
        clock.now_ns += cost_ns
        spent_ns += cost_ns
        if probe.closely:
            probe.attend(OTHER, began_ns)
        probe.mark_step()

    assert 0.9 * spent_ns < probe.machine.overhead_ns < 1.1 * spent_ns


@pytest.mark.parametrize("apart", [False, True])
def test_what_it_takes_to_take_up_steps_is_counted_once(probe: Probe, clock: Turned, apart: bool) -> None:
    """Within a span that is measured it is part of that; apart from one it is measured by itself."""
    taking_up_ns = 50 * US

    def slow(*_: object) -> None:
        clock.now_ns += taking_up_ns

    probe.mark_step()
    probe.machine.on_evaluated = slow
    probe.machine.add_samples(1)
    probe.machine.loader_end(clock.now_ns)
    probe.machine.notes.append(clock.now_ns << REGION_BITS | Region.LOADER)  # what was handed out was not trained on
    before_ns, began_ns = probe.machine.overhead_ns, clock.now_ns
    probe.catch_up(apart)

    assert clock.now_ns - began_ns == taking_up_ns
    assert probe.machine.overhead_ns - before_ns == (taking_up_ns if apart else 0)


def test_that_the_taps_are_called_is_counted_in_steps_that_are_not_observed_too(clock: Turned) -> None:
    """Three edges in each step, and 2 us for each: 6 us, beside the 10 us that a tap takes where it is observed."""
    own = Cost()
    own.call_ns = 2 * US
    total_ns = 0
    for step in range(STEPS):
        if own.measures:
            for took_us in (2, 3, 5):
                own.spent(clock() - took_us * US)
        total_ns += own.settle(step, step + 1, 1)
    unobserved_ns = own.settle(STEPS, STEPS + 1000, 0)

    assert own.calls_ns == 6 * US
    assert unobserved_ns == 1000 * 6 * US
    assert total_ns == pytest.approx(STEPS * 16 * US, rel=0.01), "but for the first, before anything was measured"


def test_a_call_is_timed() -> None:
    """A Python call takes 20 ns at least; ten thousand times that would be no call."""
    assert 20 < time_call(lambda: False) < 200 * US


def test_where_it_cannot_be_told_apart_from_nothing_a_call_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is a difference: with this clock, of the second kind of call from a slower first one."""
    readings = iter(range(0, 10**9, 10))
    monkeypatch.setattr(cost, "monotonic_ns", lambda: next(readings))
    assert time_call(lambda: True) == 0
