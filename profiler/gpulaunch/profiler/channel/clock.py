"""The clock of all processes on a machine: CLOCK_MONOTONIC, with an anchor that converts it to wall time.

Processes of one boot share CLOCK_MONOTONIC, so intervals between a rank and the sidecar need no conversion. Wall time
is for people and files only: an anchor is one reading of both clocks, and `wall_ns` converts any monotonic instant.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

monotonic_ns = time.monotonic_ns
"""Nanoseconds of CLOCK_MONOTONIC."""


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """The same instant on both clocks."""

    monotonic_ns: int
    realtime_ns: int


def anchor() -> Anchor:
    """Both clocks now; the wall reading sits between two monotonic ones and is paired with their middle."""
    before_ns = time.monotonic_ns()
    realtime_ns = time.time_ns()
    after_ns = time.monotonic_ns()
    return Anchor(monotonic_ns=(before_ns + after_ns) // 2, realtime_ns=realtime_ns)


def wall_ns(instant_ns: int, at: Anchor) -> int:
    """The wall time (ns since 1970) of a monotonic instant."""
    return at.realtime_ns + (instant_ns - at.monotonic_ns)
