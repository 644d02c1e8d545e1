"""Whether two series differ by more than chance: against what is known of such tests, and against made-up chance."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from gpulaunch.exporters.report.noise import (
    FEWEST_BLOCKS,
    SURE,
    blocks_of,
    correlation_length,
    judge,
    mann_whitney,
    shift_between,
)


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
    return found.apart or (found.p is not None and found.p <= SURE and found.large)


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
    """The negative control: 300 pairs of runs of a minute that differ by chance alone, of which 1 % may be told."""
    wrong = sum(told(wandering(seed, 60, memory), wandering(100_000 + seed, 60, memory)) for seed in range(300))

    assert wrong <= 3


def test_the_fewest_blocks_are_enough_to_be_told_among_a_dozen() -> None:
    """Else a phase that changed would be "noise", however far apart its blocks are, and not "short"."""
    apart = mann_whitney([float(block) for block in range(FEWEST_BLOCKS)], [100.0 + block for block in range(9)])

    assert mann_whitney([1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]) > 0.05 / 12
    assert apart <= 0.05 / 12


@pytest.mark.parametrize(("n", "m"), [(5, 5), (6, 6), (7, 7), (5, 8)])
def test_the_bounds_of_a_shift_hold_nineteen_times_of_twenty(n: int, m: int) -> None:
    """Over all ways to deal out n + m values of one kind, whose shift is 0; one step closer they hold too rarely."""
    values = [float(1 << power) for power in range(n + m)]
    held = closer = 0
    for a in itertools.combinations(values, n):
        b = [value for value in values if value not in a]
        low, high = shift_between(a, b)
        held += low <= 0 <= high
        apart = sorted(second - first for first in a for second in b)
        closer += apart[apart.index(low) + 1] <= 0 <= apart[apart.index(high) - 1]

    ways = math.comb(n + m, n)
    assert held / ways >= 0.95
    assert closer / ways < 0.95


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
