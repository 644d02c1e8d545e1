"""What trials of two kinds say about a gain."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.tune.measure import CLEAR, LEAST_GAIN, Losses, altered_losses, gain_of

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


def falling(seed: int = 0, *, by: float = 1.0, noise: float = 0.0, count: int = 12) -> Losses:
    """The losses of a trial: they fall from 2 to 1."""
    chance = random.Random(seed)
    return [by * (2.0 - each / count) * (1.0 + chance.gauss(0.0, noise)) for each in range(count)]


def test_losses_that_are_altered_are_told_with_both_figures() -> None:
    found = altered_losses([falling(), falling()], [falling(by=1.1)])

    assert found == (pytest.approx(1.542, abs=0.001), pytest.approx(1.696, abs=0.001))


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        ([falling(), falling()], [falling()]),
        ([falling(), falling()], [falling(by=1.04)]),  # of no concern
        ([falling()], [falling(by=2.0)]),  # how much it varies by itself is not known
        ([falling(by=1.0), falling(by=1.2)], [falling(by=1.5)]),  # the program sets no seed
        ([falling(), falling()], [falling(by=2.0, count=7)]),
        ([falling(), falling()], []),
        ([falling(), falling()], [[]]),
        ([[None] * 12, falling()], [falling(by=2.0)]),
    ],
)
def test_losses_that_differ_by_chance_or_little_are_not(base: list[Losses], changed: list[Losses]) -> None:
    assert altered_losses(base, changed) is None


def test_a_loss_that_is_infinite_only_with_the_change_is_told() -> None:
    found = altered_losses([falling(), falling()], [[*falling(count=8), None, None, None, None]])

    assert found is not None
    assert math.isnan(found[1])


def test_other_random_numbers_in_the_workers_do_not_alter_the_loss() -> None:
    """The trials of the job as it is have the same ones, with a change they are others."""
    base = [falling(noise=0.1)] * 2

    told = [altered_losses(base, [falling(seed, noise=0.1)]) for seed in range(1, 401)]

    assert sum(each is not None for each in told) <= 4


def test_losses_of_another_trajectory_are_not_altered() -> None:
    """With other random numbers, what was learnt in one step has an effect in the next."""

    def trajectory(seed: int, depends: float = 0.7, noise: float = 0.1, count: int = 16) -> Losses:
        chance, now, losses = random.Random(seed), 0.0, list[float]()
        for each in falling(count=count):
            assert each is not None
            now = depends * now + chance.gauss(0.0, noise)
            losses.append(each * (1.0 + now))
        return losses

    told = [altered_losses([trajectory(seed)] * 2, [trajectory(seed + 1000)]) for seed in range(300)]

    assert sum(each is not None for each in told) <= 12
