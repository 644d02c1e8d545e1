"""Tests whether two series of measurements differ by more than chance. Pure; standard library only.

Neighbouring intervals of a run are alike: a slow minute is 60 slow seconds, not 60 independent values. So a series is
cut into blocks twice as long as its integrated autocorrelation time (of the ranks of its values), at most 20 for the
shorter series; each block counts once, as its median. In a longer series blocks are left out, not made longer: the
median of many values misses outliers that the median of few has occasionally. The blocks of two runs are compared by
the Mann-Whitney test, exact where they are few, and their shift is the Hodges-Lehmann estimate.

That covers chance within a run. Between two runs there is more of it (other neighbours, other memory placement, other
temperature), and two runs cannot show how much. So a difference must also be larger than that between the first and
second half of each run, and larger than `LEAST_RATIO`.

A short run that drifts has too few blocks. Then a difference is reported only if the runs never come near each other:
if the gap between their values is wider, as a factor, than the range of either.

A block bootstrap cannot replace all of this. With blocks of a fixed number of values it tells equal runs apart that
wander slowly; with blocks by the autocorrelation it needs the same estimate and fewest blocks, and without the
comparison of halves and of ranges it misses runs that never come near each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Final

FEWEST_BLOCKS: Final = 7
"""Per run. With five, no order is unlikely enough to be significant among a dozen quantities; and fewer blocks are
longer ones, of a series whose autocorrelation is poorly known."""
SURE: Final = 0.005
"""Threshold of p for a single quantity. The autocorrelation of a short run is a rough estimate, so p is too small: up
to 1 % of equal pairs of one-minute runs pass it (simulated, with autocorrelation of every length)."""
_UNSURE: Final = 0.05
"""How often the shift is outside of its bounds."""
_MOST_BLOCKS: Final = 20
LEAST_RATIO: Final = 0.03
"""Smaller differences are never reported: equal runs on an idle machine differ by a percent or two."""
_MOST_EXACT: Final = 30
_FEWEST_VALUES: Final = 20


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How the second of two series differs from the first."""

    a: float
    b: float
    """Medians."""
    shift: float | None = None
    """How much larger the second is; None if there was too little to compare."""
    low: float | None = None
    high: float | None = None
    """Confidence interval of the shift (at least 95 %), for chance within the runs."""
    p: float | None = None
    """How often the blocks of equal runs differ at least as much."""
    blocks_a: int
    blocks_b: int
    drift: float = 0.0
    """The larger of the two differences between the halves of a run."""
    apart: bool = False
    """Whether the two never come near each other."""

    @property
    def ratio(self) -> float | None:
        """The shift relative to the first."""
        return None if self.shift is None or self.a == 0 else self.shift / abs(self.a)

    @property
    def large(self) -> bool:
        """Whether it is larger than the drift within a run, and large enough to matter."""
        return self.shift is not None and abs(self.shift) > max(self.drift, LEAST_RATIO * abs(self.a))


def judge(a: Sequence[float], b: Sequence[float]) -> Judgement:
    """Compare two series, each in the order in which it was measured. Neither may be empty."""
    shorter = min(len(a), len(b))
    blocks_a, blocks_b = blocks_of(a, shorter), blocks_of(b, shorter)
    if min(len(blocks_a), len(blocks_b)) < FEWEST_BLOCKS:
        apart_at_all = _apart(a, b)
        return Judgement(
            a=median(a),
            b=median(b),
            shift=median(b) - median(a) if apart_at_all else None,
            blocks_a=len(blocks_a),
            blocks_b=len(blocks_b),
            apart=apart_at_all,
        )
    apart = sorted(second - first for first in blocks_a for second in blocks_b)
    low, high = shift_between(blocks_a, blocks_b)
    return Judgement(
        a=median(a),
        b=median(b),
        shift=median(apart),
        low=low,
        high=high,
        p=mann_whitney(blocks_a, blocks_b),
        blocks_a=len(blocks_a),
        blocks_b=len(blocks_b),
        drift=max(_drift(blocks_a), _drift(blocks_b)),
    )


def blocks_of(values: Sequence[float], shorter: int | None = None) -> list[float]:
    """Return the medians of a series' blocks. A remainder is dropped at the beginning.

    Args:
        values: the series.
        shorter: number of values of the shorter of the two series; None: this one.
    """
    count = len(values)
    remembered = correlation_length(values)
    least = math.ceil((count if shorter is None else shorter) / _MOST_BLOCKS)
    length = max(1 if remembered < 1.5 else math.ceil(2 * remembered), least)
    number = count // length
    begin = count - number * length
    blocks = [median(values[begin + index * length : begin + (index + 1) * length]) for index in range(number)]
    return (
        [blocks[index * number // _MOST_BLOCKS] for index in range(_MOST_BLOCKS)] if number > _MOST_BLOCKS else blocks
    )


def correlation_length(values: Sequence[float]) -> float:
    """Return the integrated autocorrelation time of a series, in intervals; 1 if uncorrelated.

    Summed in pairs of lags while they are positive and decreasing (Geyer's initial monotone sequence). Computed on the
    ranks of the values: a few very long intervals must not hide the correlation of the others.
    """
    count = len(values)
    if count < 4:
        return 1.0
    ranks, _ = _ranks(values)
    middle = (count + 1) / 2
    centred = [rank - middle for rank in ranks]
    whole = sum(each * each for each in centred)
    if whole <= 0:
        return 1.0  # constant: no correlation

    def correlation(lag: int) -> float:
        return sum(centred[index] * centred[index + lag] for index in range(count - lag)) / whole

    total, before = 0.0, math.inf
    for lag in range(0, count - 1, 2):
        pair = correlation(lag) + correlation(lag + 1)
        if pair <= 0:
            break
        before = min(before, pair)
        total += before
    return max(1.0, 2 * total - 1)


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the p-value: how often two samples of one distribution differ at least this much (two-sided)."""
    n, m = len(a), len(b)
    ranks, ties = _ranks([*a, *b])
    u = sum(ranks[:n]) - n * (n + 1) / 2
    if not ties and max(n, m) <= _MOST_EXACT:
        smaller = round(min(u, n * m - u))
        ways = sum(_ways(n, m, each) for each in range(smaller + 1))
        return min(1.0, 2 * ways / math.comb(n + m, n))
    both = n + m
    spread = math.sqrt(n * m / 12 * ((both + 1) - ties / (both * (both - 1))))
    if spread == 0:
        return 1.0
    z = max(0.0, abs(u - n * m / 2) - 0.5) / spread
    return math.erfc(z / math.sqrt(2))


def shift_between(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return the bounds (at least 95 %) of how much larger the second of two samples is than the first.

    The k-th smallest and the k-th largest of all differences: values outside of them are as unlikely as a rank
    sum with fewer than k inverted pairs (Hollander, Wolfe, Chicken: Nonparametric Statistical Methods,
    3rd edition, 4.3). With very few values nothing is that unlikely, and the bounds are the outermost differences.
    """
    n, m = len(a), len(b)
    apart = sorted(second - first for first in a for second in b)
    most = _UNSURE / 2 * math.comb(n + m, n)
    kth, ways = 0, _ways(n, m, 0)
    while ways <= most:
        kth += 1
        ways += _ways(n, m, kth)
    return apart[max(0, kth - 1)], apart[-max(1, kth)]


@cache
def _ways(n: int, m: int, u: int) -> int:
    """Return the number of orders of n and m values with exactly u inverted pairs."""
    if u < 0:
        return 0
    if n == 0 or m == 0:
        return int(u == 0)
    return _ways(n - 1, m, u - m) + _ways(n, m - 1, u)


def _ranks(values: Sequence[float]) -> tuple[list[float], int]:
    """Return the ranks, ties as their mean; and the sum of t^3 - t over groups of ties."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks, ties = [0.0] * len(values), 0
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and values[order[end]] == values[order[begin]]:
            end += 1
        for index in order[begin:end]:
            ranks[index] = (begin + end + 1) / 2
        ties += (end - begin) ** 3 - (end - begin)
        begin = end
    return ranks, ties


def _apart(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether the gap between two series is wider than the range of either, without the outermost tenths of its values.
    As factors, so that it is the same for times and rates. False for few values."""
    if min(len(a), len(b)) < _FEWEST_VALUES or min(*a, *b) <= 0:
        return False
    (low_a, high_a), (low_b, high_b) = (
        (math.log(_quantile(each, 0.1)), math.log(_quantile(each, 0.9))) for each in (a, b)
    )
    return max(low_b - high_a, low_a - high_b) > max(high_a - low_a, high_b - low_b)


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


def _drift(blocks: Sequence[float]) -> float:
    """Return how much the halves of a run differ."""
    half = len(blocks) // 2
    return abs(median(blocks[:half]) - median(blocks[-half:]))
