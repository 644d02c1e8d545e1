"""Decides when a stall is reported: once, each time its length has doubled, and when ranks move again. Pure."""

from __future__ import annotations

from collections.abc import Callable

from gpulaunch.launcher.hang.values import Verdict


class Announcer:
    """At most one stall at a time; what is added meanwhile is part of the next report."""

    def __init__(self) -> None:
        self.from_s = 0.0
        """Report, or report again, from this quiet time on."""
        self._moved_s: dict[int, float] = {}

    def is_due(self, verdict: Verdict) -> bool:
        """Whether to report it now."""
        return verdict.tells and verdict.quiet_s >= self.from_s

    def again_s(self, verdict: Verdict) -> float:
        """When to look again: no later than the next report is due."""
        left_s = self.from_s - verdict.quiet_s
        return min(verdict.again_s, left_s) if left_s > 0 else verdict.again_s

    def reported(self, verdict: Verdict, moved_s: Callable[[int], float | None]) -> None:
        """It was reported; `moved_s`: when a rank last moved on, None if it has ended."""
        ranks = verdict.odd or tuple(rank for group in verdict.groups for rank in group.ranks)
        self.from_s = 2 * verdict.quiet_s
        self._moved_s = {rank: known for rank in ranks if (known := moved_s(rank)) is not None}

    def resolved(self, moved_s: Callable[[int], float | None]) -> tuple[tuple[int, ...], float] | None:
        """The stall is over: which ranks have moved on, and after how long; None: some reported rank has not.

        Ranks that have ended are not included.
        """
        now_s = {rank: moved_s(rank) for rank in self._moved_s}
        if not self.from_s or any(now_s[rank] == before_s for rank, before_s in self._moved_s.items()):
            return None
        moved = {rank: at_s - self._moved_s[rank] for rank, at_s in now_s.items() if at_s is not None}
        self.from_s, self._moved_s = 0.0, {}
        return tuple(sorted(moved)), max(moved.values(), default=0.0)
