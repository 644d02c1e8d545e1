"""Judges what a change gains, from the step times of trials with and without it. Pure.

Every trial measures the same steps of the program, so two of one kind differ by the machine only. With two or three of
each there is no distribution to estimate: the interval told is the smallest and the largest gain of all pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, median, stdev
from typing import Final, Literal

LEAST_GAIN: Final = 0.03
"""A smaller gain is not recommended: `gpulaunch compare` does not tell one of two runs either."""
FEWEST: Final = 2
"""Trials of each kind before a gain is sure: one may have met another process."""
CLEAR: Final = 0.5
"""A gain that is larger in all pairs is sure after one trial with the change, between two without it."""
MOST: Final = 5
"""Trials of one change; what is not sure by then is reported as such."""

FEWEST_LOSSES: Final = 8
"""Means of losses (four each) in all trials, before they are compared."""
_ERRORS: Final = 4.0
"""Standard errors by which losses differ that are not the same: those of successive steps depend on each other."""
_LEAST_DIFFERENCE: Final = 0.05
"""Of the loss; less may be another order of the same samples."""

_CLEAR_DIFFERENCE: Final = 0.4
"""Of the loss, in all of the later half of the steps: something else is learnt, though the losses part slowly."""

Losses = Sequence[float | None]
"""Means of the losses of a trial, in the order of its steps; None: not finite."""

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


def altered_losses(base: Sequence[Losses], changed: Sequence[Losses]) -> tuple[float, float] | None:
    """Return the mean loss of the same steps without and with a change, if it differs by more than by chance.

    Chance is how far trials without the change are apart, and how far the losses of single steps are: a change of the
    workers gives other random numbers to what they do.

    Args:
        base: of each trial without the change. Fewer than two: None is returned.
        changed: of each trial with it.
    """
    count = min((len(losses) for losses in (*base, *changed)), default=0)
    if len(base) < FEWEST or not changed or count < FEWEST_LOSSES:
        return None
    of_base = [[each for each in losses[:count] if each is not None] for losses in base]
    of_changed = [[each for each in losses[:count] if each is not None] for losses in changed]
    if any(len(losses) < count for losses in of_base):
        return None  # it diverges by itself
    before = fmean(map(fmean, of_base))
    if any(len(losses) < count for losses in of_changed):
        return before, float("nan")
    after = fmean(map(fmean, of_changed))
    means = [fmean(losses) for losses in of_base]
    apart = (max(means) - min(means)) / (abs(before) or 1.0)
    one, other = ([fmean(each) for each in zip(*losses, strict=True)] for losses in (of_base, of_changed))
    return (before, after) if _differ(one, other, apart) else None


def _differ(base: Sequence[float], changed: Sequence[float], apart: float) -> bool:
    """Whether two series of losses are not the same but for chance; `apart`: how far trials of one kind are, relative
    to the loss."""
    relative = [2.0 * (b - a) / (abs(a) + abs(b) or 1.0) for a, b in zip(base, changed, strict=True)]
    later = relative[len(relative) // 2 :]
    if (min(later) > 0.0 or max(later) < 0.0) and abs(fmean(later)) >= _CLEAR_DIFFERENCE + _ERRORS * apart:
        return True
    return abs(fmean(relative)) > max(_ERRORS * apart, _ERRORS * _error_of_mean(relative), _LEAST_DIFFERENCE)


def _error_of_mean(series: Sequence[float]) -> float:
    """The standard error of the mean of a series in which neighbours depend on each other."""
    middle, spread = fmean(series), stdev(series)
    if not spread:
        return 0.0
    alike = fmean((one - middle) * (after - middle) for one, after in pairwise(series)) / spread**2
    alike = min(max(alike + 1.0 / sqrt(len(series)), 0.0), 0.95)  # of few values it is estimated too low
    return spread * sqrt((1.0 + alike) / (1.0 - alike) / len(series))


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
