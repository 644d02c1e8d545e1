"""Monotonic totals of a driver's counters since the first reading, across wraps, resets and invalid values. Pure.

A total starts at 0 with the sampler, because earlier values do not belong to this run. It never falls: a counter that
fell, or grew faster than is possible, was reset (with the card, or by a reload of the driver) or is invalid. Either way
counting starts again from its value, and the growth between the two readings is not counted.
"""

from __future__ import annotations

import math
from typing import Final

_NARROW: Final = 1 << 32
_SLACK_S: Final = 10.0  # drivers update some counters only every few seconds, and then all at once

# Bytes per second and lane after line encoding, by generation of PCI Express; the actual throughput is lower.
_LANE_BYTES_PER_S: Final = {1: 250e6, 2: 500e6, 3: 985e6, 4: 1.97e9, 5: 3.94e9, 6: 8.0e9}


def link_bytes_per_s(generation: int | None, width: int | None) -> float:
    """Return the maximum rate of a PCIe link in one direction; infinity if its figures are not known."""
    if not generation or not width:
        return math.inf
    return _LANE_BYTES_PER_S.get(generation, math.inf) * width


class Total:
    """The growth of a counter that is wide enough never to wrap."""

    def __init__(self, most_per_s: float) -> None:
        """`most_per_s`: the fastest possible growth."""
        self._most_per_s = most_per_s
        self._total = 0
        self._last: tuple[int, float] | None = None

    def add(self, value: int, at_s: float) -> int:
        """Take the counter's value; return the total."""
        if self._last is not None:
            grown = value - self._last[0]
            if 0 <= grown <= self._most_per_s * (at_s - self._last[1] + _SLACK_S):
                self._total += grown
        self._last = value, at_s
        return self._total


class LinkTotal:
    """The growth of a byte counter of a PCIe link, which may wrap at 4 GiB.

    NVML documents only that it "can be wrapped" (nvml.h), and its type does not show where: there are cards whose
    values stay below 4 GiB (NVIDIA/dcgm-exporter#721). So a counter is treated as narrow until a value exceeds that. A
    narrow one can be followed only if the link cannot move 4 GiB between two readings; 16 lanes of generation 4 do it
    in 0.14 s. Otherwise the total is not known, unless the counter turns out to be wide: then it has never wrapped.
    """

    def __init__(self, most_per_s: float) -> None:
        """`most_per_s`: the maximum rate of the link, see `link_bytes_per_s`."""
        self._most_per_s = most_per_s
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._narrow = 0
        self._followed = True
        self._wide: Total | None = None

    def add(self, value: int, at_s: float) -> int | None:
        """Take the counter's value; return the total, or None if it is not known (yet)."""
        if self._first is None:
            self._first = value, at_s
        if self._wide is None and value >= _NARROW:
            self._wide = Total(self._most_per_s)
            self._wide.add(*self._first)
        if self._wide is not None:
            return self._wide.add(value, at_s)
        before, self._last = self._last, (value, at_s)
        if before is None:
            return None
        self._narrow += (value - before[0]) % _NARROW
        if self._most_per_s * (at_s - before[1]) >= _NARROW:
            self._followed = False
        return self._narrow if self._followed else None
