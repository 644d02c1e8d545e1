"""Medians. Those of the standard library bring fractions, decimals and random numbers along: 2 MB in the sidecar."""

from __future__ import annotations

from collections.abc import Iterable


def median(values: Iterable[float]) -> float:
    """Give the middle of the values, or the mean of the two in the middle; there must be one at least."""
    ordered = sorted(values)
    return 0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])


def median_low(values: Iterable[float]) -> float:
    """Give the middle one, or the lower of the two in the middle."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def median_high(values: Iterable[float]) -> float:
    """Give the middle one, or the higher of the two in the middle."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
