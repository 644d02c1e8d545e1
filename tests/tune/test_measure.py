"""What trials of two kinds say about a gain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.tune.measure import CLEAR, LEAST_GAIN, gain_of

seconds = st.floats(1e-3, 10.0)


@pytest.mark.parametrize(
    ("base_s", "changed_s", "verdict"),
    [
        ([0.100], [0.050], "unsure"),  # one trial of each may be chance
        ([0.100, 0.102], [0.050], "gain"),  # one before, one after
        ([0.100, 0.102], [0.070], "unsure"),
        ([0.100, 0.102], [0.050, 0.051], "gain"),
        ([0.100, 0.102], [0.099, 0.101], "none"),
        ([0.100], [0.120], "none"),  # slower: not tried again
        ([0.100, 0.140], [0.090, 0.130], "unsure"),  # the machine varies by more than the gain
        ([0.100, 0.104, 0.102], [0.097, 0.095, 0.096], "gain"),
        ([0.100, 0.104, 0.102], [0.101, 0.095, 0.096], "unsure"),
        ([0.100, 0.101], [0.098, 0.0985], "none"),  # 2 %: less than what is told
    ],
)
def test_a_gain_is_sure_if_it_is_there_in_all_pairs(base_s: list[float], changed_s: list[float], verdict: str) -> None:
    assert gain_of(base_s, changed_s).verdict == verdict


@given(st.lists(seconds, min_size=1, max_size=5), st.lists(seconds, min_size=1, max_size=5))
def test_bounds_hold_the_median_and_what_is_recommended_is_faster(base_s: list[float], changed_s: list[float]) -> None:
    gain = gain_of(base_s, changed_s)

    assert gain.low <= gain.median <= gain.high
    if gain.verdict == "gain":
        assert max(changed_s) <= min(base_s)
        assert gain.median > 0
    if len(base_s) == 1 or (len(changed_s) == 1 and gain.low < CLEAR):
        assert gain.verdict != "gain"


@given(st.lists(seconds, min_size=2, max_size=5))
def test_the_same_times_are_never_a_gain(times_s: list[float]) -> None:
    assert gain_of(times_s, times_s).verdict == "none"
    assert gain_of(times_s, times_s).median < LEAST_GAIN
