"""Counters of a driver, over wraps, restarts and nonsense."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.samplers.nvml.counters import LinkTotal, Total, link_bytes_per_s

NARROW = 1 << 32
traffic = st.lists(st.integers(0, NARROW - 1), min_size=1, max_size=30)


@given(st.integers(0, 1 << 63), st.lists(st.integers(0, 1000)))
def test_a_total_is_what_has_come_since_the_first_reading(first: int, moved: list[int]) -> None:
    total = Total(1000.0)
    counter, at_s = first, 0.0
    assert total.add(counter, at_s) == 0
    for each in moved:
        counter, at_s = counter + each, at_s + 1
        assert total.add(counter, at_s) == counter - first


@given(st.lists(st.tuples(st.integers(0, 1 << 64), st.floats(0, 100))))
def test_a_total_never_falls_and_never_outruns_its_thing(readings: list[tuple[int, float]]) -> None:
    total = Total(1000.0)
    at_s, before = 0.0, 0
    for value, later_s in readings:
        at_s += later_s
        now = total.add(value, at_s)
        assert before <= now <= before + 1000 * (later_s + 10) + 1
        before = now


def test_a_card_that_was_reset_begins_anew() -> None:
    total = Total(1000.0)
    assert [total.add(value, at_s) for at_s, value in enumerate([500, 700, 0, 30])] == [0, 200, 200, 230]


def test_a_zero_between_two_good_readings_counts_nothing_twice() -> None:
    total = Total(1000.0)
    assert [total.add(value, at_s) for at_s, value in enumerate([500_000, 500_100, 0, 500_300])] == [0, 100, 100, 100]


@given(st.integers(0, NARROW - 1), traffic)
def test_a_narrow_counter_is_followed_over_any_number_of_wraps(first: int, moved: list[int]) -> None:
    """As long as less than 4 GiB can pass between two readings; here at most 4 GiB - 1 in half a second."""
    total = LinkTotal(most_per_s=NARROW)
    assert total.add(first, 0.0) is None
    for number, _ in enumerate(moved, 1):
        passed = sum(moved[:number])
        assert total.add((first + passed) % NARROW, number / 2) == passed


@given(st.integers(0, NARROW - 1), traffic)
def test_what_may_have_wrapped_unseen_is_not_known(first: int, moved: list[int]) -> None:
    total = LinkTotal(most_per_s=NARROW)
    total.add(first, 0.0)
    counter, at_s = first, 0.0
    for each in moved:
        counter, at_s = (counter + each) % NARROW, at_s + 1
        assert total.add(counter, at_s) is None


@given(st.integers(0, 1 << 40), st.lists(st.integers(0, 1 << 36), min_size=1, max_size=30))
def test_a_counter_that_is_seen_above_4_gib_was_wide_all_the_time(first: int, moved: list[int]) -> None:
    total = LinkTotal(most_per_s=1 << 37)
    total.add(first, 0.0)
    counter = first
    for at_s, each in enumerate(moved, 1):
        counter += each
        expected = counter - first if counter >= NARROW else None
        assert total.add(counter, float(at_s)) == expected


@pytest.mark.parametrize(
    ("generation", "width", "gigabytes_per_s"),
    [(3, 16, 15.76), (4, 16, 31.52), (5, 16, 63.04), (4, 8, 15.76), (None, 16, math.inf), (5, 0, math.inf)],
)
def test_what_a_link_can_move(generation: int | None, width: int, gigabytes_per_s: float) -> None:
    assert link_bytes_per_s(generation, width) == pytest.approx(gigabytes_per_s * 1e9)


def test_a_generation_from_the_future_may_be_as_fast_as_it_likes() -> None:
    assert link_bytes_per_s(9, 16) == math.inf
