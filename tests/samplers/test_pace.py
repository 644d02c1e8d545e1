"""How fast a host computes what is no large operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, repeat

from gpulaunch.profiler.samplers.pace import Pace


def clock(turns_ns: Iterable[float]) -> Callable[[], int]:
    """Each two readings are a thousand turns apart that take so long."""
    times = chain.from_iterable((0, int(1000 * each)) for each in turns_ns)
    return lambda: next(times)


def test_one_that_met_an_interrupt_does_not_count() -> None:
    pace = Pace(clock([20, 20, 900, 21, 20]))

    assert [pace.measure() for _ in range(5)] == [20, 20, 20, 20.5, 20]


def test_a_host_that_others_slow_down_is_known_to_be_in_seconds() -> None:
    pace = Pace(clock(chain(repeat(20, 100), repeat(60, 8))))
    for _ in range(107):
        pace.measure()

    assert pace.measure() == 60


def test_this_one_has_a_pace() -> None:
    assert 1 < Pace().measure() < 100_000
