"""Judges what a change gains, from the step times of trials with and without it. Pure.

Every trial measures the same steps of the program, so two of one kind differ by the machine only. With two or three of
each there is no distribution to estimate: the interval told is the smallest and the largest gain of all pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

LEAST_GAIN: Final = 0.03
"""A smaller gain is not recommended: `gpulaunch compare` does not tell one of two runs either."""
FEWEST: Final = 2
"""Trials of each kind before a gain is sure: one may have met another process."""
CLEAR: Final = 0.5
"""A gain that is larger in all pairs is sure after one trial with the change, between two without it."""
MOST: Final = 5
"""Trials of one change; what is not sure by then is reported as such."""

Verdict = Literal["gain", "none", "unsure"]


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How much faster the job is with a change: 0.25 is a quarter more steps in the same time."""

    median: float
    low: float
    high: float
    verdict: Verdict


def gain_of(base_s: Sequence[float], changed_s: Sequence[float]) -> Gain:
    """Return the gain of a change.

    Args:
        base_s: mean step time in seconds of each trial without the change; at least one.
        changed_s: of each trial with it; at least one.
    """
    middle = median(base_s) / median(changed_s) - 1.0
    low, high = min(base_s) / max(changed_s) - 1.0, max(base_s) / min(changed_s) - 1.0
    verdict = _verdict(middle, low, high, base=len(base_s), changed=len(changed_s))
    return Gain(median=middle, low=low, high=high, verdict=verdict)


def _verdict(middle: float, low: float, high: float, *, base: int, changed: int) -> Verdict:
    """`base`, `changed`: how many trials there were of each."""
    trials = min(base, changed)
    if base >= FEWEST and low >= CLEAR:
        return "gain"
    if high < LEAST_GAIN or (trials >= FEWEST and middle < LEAST_GAIN):
        return "none"
    # The outermost pairs of ever more trials are ever farther apart: with many, all of them above zero is sure.
    if trials >= FEWEST and low >= (LEAST_GAIN if trials == FEWEST else 0.0):
        return "gain"
    return "unsure"
