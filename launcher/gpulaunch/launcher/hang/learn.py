"""Learns how long a training thread usually takes between two edges: the longest interval seen, by region. Pure.

The input is the age of the last edge, read once a second, so an interval is known to one second, and intervals under a
second are not seen: the least allowance is far above both. The ranks of a node share what they learn: they run the
same program.
"""

from __future__ import annotations

from gpulaunch.launcher.hang.values import Limits
from gpulaunch.profiler.channel.layout import Region

_AGAIN = 1.5
"""A stall that lasted this long and ended by itself is reported again only after half as much more, up to
`Limits.told_patiently_s`."""


class Learner:
    """The longest interval of each region, and the allowance made from it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._longest_s: dict[Region, float] = {}

    def learn(self, region: Region, interval_s: float) -> None:
        """An interval in `region` has ended by itself: this length is normal."""
        if interval_s > self._longest_s.get(region, 0.0):
            self._longest_s[region] = interval_s

    def allowed_s(self, region: Region) -> float:
        """How long a rank may be in `region` before it is reported: always before it is acted on."""
        limits, longest_s = self._limits, self._longest_s.get(region, 0.0)
        usual_s = min(limits.told_at_most_s, max(limits.told_s, limits.safety * longest_s))
        longer_s = min(limits.told_patiently_s, _AGAIN * longest_s)
        return min(limits.timeout_s / 2, max(usual_s, longer_s))
