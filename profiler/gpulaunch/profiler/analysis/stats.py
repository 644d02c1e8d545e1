"""Medians. The standard library's `statistics` imports fractions, decimal and random: 2 MB in the sidecar."""

from __future__ import annotations

from collections.abc import Iterable


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
