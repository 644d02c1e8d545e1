"""Whether two series differ by more than chance: against what is known of such tests, and against made-up chance."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from gpulaunch.exporters.report.noise import blocks_of, correlation_length, judge, mann_whitney


def wandering(seed: int, count: int, memory: float, *, level: float = 100.0) -> list[float]:
    """Noise that remembers (an autoregressive process of order one), a few per cent about its level."""
    chance = random.Random(seed)
    at, series = chance.gauss(0, 1) / math.sqrt(1 - memory * memory), []
    for _ in range(count):
        at = memory * at + chance.gauss(0, 1)
        series.append(level * (1 + 0.05 * at * math.sqrt(1 - memory * memory)))
    return series


def told(a: list[float], b: list[float]) -> bool:
    found = judge(a, b)
    return found.apart or (found.p is not None and found.p <= 0.01 and found.large)


def test_the_exact_test_counts_every_order() -> None:
    """For three and four values: by hand, over all 35 ways to deal them out."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    a = (1.0, 2.0, 4.0)

    def wrong(one: tuple[float, ...]) -> int:
        other = [value for value in values if value not in one]
        pairs = sum(x > y for x in one for y in other)
        return min(pairs, 12 - pairs)

    as_far = sum(wrong(one) <= wrong(a) for one in itertools.combinations(values, 3))

    assert mann_whitney(a, [3.0, 5.0, 6.0, 7.0]) == pytest.approx(as_far / math.comb(7, 3))


def test_with_ties_and_with_many_it_is_the_normal_one() -> None:
    """As scipy 1.17 gives it (mannwhitneyu, method="asymptotic")."""
    assert mann_whitney([1.0, 2.0, 2.0, 3.0], [2.0, 3.0, 4.0, 4.0]) == pytest.approx(0.134169, abs=1e-6)
    assert mann_whitney([1.0] * 8, [1.0] * 8) == 1.0


def test_what_a_series_remembers_is_how_long_a_block_is() -> None:
    """White noise remembers nothing; with memory m, an autoregressive series remembers (1 + m) / (1 - m)."""
    assert correlation_length(wandering(1, 2000, 0.0)) == pytest.approx(1.0, abs=0.3)
    assert correlation_length(wandering(1, 4000, 0.8)) == pytest.approx(9.0, rel=0.35)
    assert len(blocks_of(wandering(2, 20, 0.0))) == 20
    assert len(blocks_of(wandering(2, 180, 0.0))) == 20
    assert len(blocks_of(wandering(2, 180, 0.9))) < 12
    assert correlation_length([5.0] * 50) == 1.0


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.8, 0.95])
def test_equal_runs_are_hardly_ever_told_apart(memory: float) -> None:
    """The negative control: 60 pairs of runs that differ by chance alone."""
    wrong = sum(told(wandering(seed, 60, memory), wandering(1000 + seed, 60, memory)) for seed in range(60))

    assert wrong <= 6


def test_a_test_that_forgets_the_memory_is_wrong_all_the_time() -> None:
    """What the blocks are for: the same pairs, taken second by second."""
    wrong = sum(mann_whitney(wandering(seed, 60, 0.95), wandering(1000 + seed, 60, 0.95)) <= 0.01 for seed in range(60))

    assert wrong >= 20


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.8])
def test_a_slower_run_is_told(memory: float) -> None:
    """The positive control: steps that are a third longer, while chance makes 5 % of difference."""
    right = sum(
        told(wandering(seed, 120, memory), wandering(1000 + seed, 120, memory, level=133.0)) for seed in range(40)
    )

    assert right >= 36


def test_few_values_say_nothing_however_far_apart() -> None:
    found = judge([1.0, 1.1, 1.0], [9.0, 9.1, 9.0])

    assert (found.shift, found.p, found.apart, found.ratio) == (None, None, False, None)


def test_a_run_that_never_comes_near_the_other_is_told_even_if_it_wanders() -> None:
    """Two slopes of 30 seconds: no blocks to speak of, but ten times as long is ten times as long."""
    slope = [100.0 + second for second in range(30)]

    found = judge(slope, [10 * value for value in slope])

    assert (found.p, found.apart, found.large) == (None, True, True)
    assert found.ratio == pytest.approx(9.0)
    assert judge(slope, [value + 20 for value in slope]).shift is None


def test_the_shift_is_between_its_bounds() -> None:
    found = judge(wandering(1, 100, 0.0), wandering(2, 100, 0.0, level=120.0))

    assert found.shift is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.shift < found.high
    assert found.shift == pytest.approx(20.0, abs=3.0)


def test_a_small_difference_is_not_told_however_sure() -> None:
    found = judge(wandering(1, 2000, 0.0, level=100.0), [value + 1.0 for value in wandering(1, 2000, 0.0, level=100.0)])

    assert not found.large
