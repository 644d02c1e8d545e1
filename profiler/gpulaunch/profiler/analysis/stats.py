"""Medians, and the error of a share. The standard library's `statistics` imports fractions, decimal and random: 2 MB in
the sidecar."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt


def median(values: Iterable[float]) -> float:
    """Return the middle of the values, or the mean of the two in the middle; there must be at least one value."""
    ordered = sorted(values)
    return 0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])


def median_low(values: Iterable[float]) -> float:
    """Return the middle value, or the lower of the two in the middle."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def median_high(values: Iterable[float]) -> float:
    """Return the middle value, or the higher of the two in the middle."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def standard_error(count: int, samples: int) -> float:
    """Return the standard error of the share `count / samples`; it is never certain: all of four samples may be half of
    the time."""
    likely = (count + 1) / (samples + 2)
    return sqrt(likely * (1.0 - likely) / samples)
