"""Pairs of runs: in what order, and what may be said of the median of a few."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, TypeVar

__all__ = ["CONFIDENCE", "halves", "interval", "middle", "pairs_for", "there_and_back"]

T = TypeVar("T")

CONFIDENCE = 0.95


def there_and_back(*ways: T) -> list[T]:
    """The ways and then the ways backwards: what drifts at a steady pace favours none of them."""
    return [*ways, *reversed(ways)]


def halves(cell: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """The way there and the way back."""
    return cell[: len(cell) // 2], cell[len(cell) // 2 :]


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Where the median of what the values are drawn from lies, with at least this confidence; None: too few of them.

    By order statistics, whatever the distribution is: of n draws, as many are below the median as of n coins fall on
    heads. Six are the fewest that say anything at 95 %.
    """
    ordered = sorted(values)
    outside, below = 0, 0.0
    for heads in range(len(ordered) // 2):
        below += math.comb(len(ordered), heads) / 2 ** len(ordered)
        if below > (1 - confidence) / 2:
            break
        outside = heads + 1
    return (ordered[outside - 1], ordered[-outside]) if outside else None


def middle(values: Sequence[float]) -> dict[str, Any]:
    """Their median, its interval, and how far they lie apart."""
    return {
        "pairs": len(values),
        "median": statistics.median(values) if values else None,
        "interval": interval(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
    }


def pairs_for(half_width: float, deviation: float) -> int:
    """About how many pairs an interval of that half width takes, where single pairs deviate so much.

    The median of n normal values deviates by sqrt(pi / 2) of what their mean does.
    """
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return max(6, math.ceil(math.pi / 2 * (z * deviation / half_width) ** 2))
