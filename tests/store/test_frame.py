"""Rows as bytes and back, and several rows as one."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.exporters.store.frame import Frame, decode, encode, fold

NAN = math.nan


def frame(
    counters: list[float], gauges: list[float], *, begin_s: float = 0.0, end_s: float = 1.0, looks: int = 1
) -> Frame:
    return Frame(
        begin_s=begin_s,
        end_s=end_s,
        run=1,
        attempt=0,
        looks=looks,
        counters=counters,
        lows=gauges,
        means=gauges,
        highs=gauges,
    )


def back(one: Frame) -> Frame:
    return decode(
        encode(one),
        num_counters=len(one.counters),
        begin_s=one.begin_s,
        end_s=one.end_s,
        run=one.run,
        attempt=one.attempt,
        looks=one.looks,
    )


@given(
    st.lists(st.one_of(st.just(NAN), st.integers(0, 1 << 53).map(float)), max_size=40),
    st.lists(st.one_of(st.just(NAN), st.floats(width=32, allow_nan=False, allow_infinity=False)), max_size=40),
    st.integers(1, 3),
)
def test_whole_counters_and_gauges_come_back_as_they_were(
    counters: list[float], gauges: list[float], looks: int
) -> None:
    one = frame(counters, [value if abs(value) < 3e38 or value != value else 0.0 for value in gauges], looks=looks)

    again = back(one)

    assert again.counters == array("d", one.counters) or all(
        a == b or (a != a and b != b) for a, b in zip(again.counters, one.counters, strict=True)
    )
    for part in ("lows", "means", "highs"):
        pairs = zip(getattr(again, part), getattr(one, part), strict=True)
        assert all(a == b or (a != a and b != b) for a, b in pairs)


def test_seconds_are_kept_to_a_sixteen_thousandth() -> None:
    (kept,) = back(frame([12345.678901], [])).counters

    assert kept == pytest.approx(12345.678901, abs=1 / 32768)


@given(st.binary(max_size=200), st.integers(-2, 50), st.integers(1, 2))
def test_bytes_that_are_no_row_are_refused(data: bytes, num_counters: int, looks: int) -> None:
    with pytest.raises(ValueError, match="damaged"):
        decode(data, num_counters=num_counters, begin_s=0, end_s=1, run=1, attempt=None, looks=looks)


def test_the_newest_counter_stands_and_gauges_have_lowest_mean_and_highest() -> None:
    one = frame([10.0, 5.0], [4.0, NAN], begin_s=0.0, end_s=1.0)
    two = frame([20.0, NAN, 7.0], [8.0, NAN, 1.0], begin_s=1.0, end_s=2.0)

    folded = fold([one, two])

    assert (folded.begin_s, folded.end_s, folded.looks) == (0.0, 2.0, 2)
    assert list(folded.counters) == [20.0, 5.0, 7.0]
    assert [folded.lows[0], folded.means[0], folded.highs[0]] == [4.0, 6.0, 8.0]
    assert folded.means[1] != folded.means[1]
    assert folded.means[2] == 1.0


def test_folding_twice_is_as_folding_once() -> None:
    rows = [frame([float(i)], [float(i * i)], begin_s=i, end_s=i + 1) for i in range(12)]

    at_once = fold(rows)
    in_turns = fold([fold(rows[:4]), fold(rows[4:6]), fold(rows[6:])])

    assert list(at_once.counters) == list(in_turns.counters)
    assert [at_once.lows[0], at_once.highs[0]] == [in_turns.lows[0], in_turns.highs[0]]
    assert at_once.means[0] == pytest.approx(in_turns.means[0])
    assert at_once.looks == in_turns.looks == 12
