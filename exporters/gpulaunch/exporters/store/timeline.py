"""The timeline of the rows: wall time that never goes back or jumps, even if the node's clock is set."""

from __future__ import annotations

from typing import Final

_SLEW_S: Final = 0.02
"""How far one sample may slew the timeline towards the wall clock: 2 % at one sample a second."""
_STEP_S: Final = 5.0
"""A clock that is further off was set: the timeline then ignores the jump."""
_APART_S: Final = 0.001


class Timeline:
    """The timeline of one sidecar. It begins after the newest row of an earlier sidecar."""

    def __init__(self, newest_s: float | None) -> None:
        self._newest_s = newest_s
        self._offset_s: float | None = None

    def at(self, wall_s: float, monotonic_s: float) -> float:
        """Return the time of a moment, always later than the previous one."""
        if self._offset_s is None:
            self._offset_s = wall_s - monotonic_s
        off_s = wall_s - monotonic_s - self._offset_s
        if abs(off_s) <= _STEP_S:
            self._offset_s += max(-_SLEW_S, min(_SLEW_S, off_s))
        now_s = monotonic_s + self._offset_s
        if self._newest_s is not None and now_s <= self._newest_s:
            # The clock was set back between samples, or samples come very fast.
            if self._newest_s - now_s > _STEP_S:
                self._offset_s += self._newest_s + 1.0 - now_s
            now_s = max(monotonic_s + self._offset_s, self._newest_s + _APART_S)
        self._newest_s = now_s
        return now_s
