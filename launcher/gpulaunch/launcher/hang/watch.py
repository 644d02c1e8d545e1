"""Decides when to inspect ranks: their quiet time against their allowance, once a second. Pure; the caller has a clock.

    rank                                             inspected after     reported after
    stopped by a signal (state T)                    stopped_s           the same
    without a probe, or whose probe has given up     never               never
    before its first step has ended, or in a save    floor               told_patiently_s
    any other                                        floor               learnt: safety x longest, 30 .. 60 s

An inspection costs a few milliseconds of a helper process and the rank nothing, so it begins at the floor. `judge`,
which has seen the stacks, decides what is reported and whether to act.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpulaunch.launcher.hang.learn import Learner
from gpulaunch.launcher.hang.values import Limits, RankProgress
from gpulaunch.profiler.channel.layout import Region

_GAP_S = 5.0
"""The caller comes once a second; after a longer gap it was stopped or starved, and perhaps everything else too."""


@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """What is visible of one live rank without disturbing it."""

    rank: int
    pid: int
    state: str
    """State letter; "" if it was not read because the rank moves."""
    armed: bool = False
    region: Region = Region.NONE
    edge_s: float = 0.0
    """When its training thread passed the last edge; 0: never."""
    armed_s: float = 0.0
    steps: int = 0
    begun: bool = False
    saving: bool = False
    left_group: bool = False


@dataclass
class _Rank:
    """What is remembered of a rank."""

    seen: tuple[object, ...]
    region: Region
    begun: bool
    moved_s: float
    """When it last moved on."""
    stopped_since_s: float | None = None
    was_stopped: bool = False
    """Stopped since it last moved: then its duration is not normal."""


class Watch:
    """Remembers when each rank last moved, learns, and reports which have been quiet for too long."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._learner = Learner(limits)
        self._ranks: dict[int, _Rank] = {}
        self._last_s: float | None = None

    def tick(self, now_s: float, looks: Sequence[RankSnapshot]) -> tuple[RankProgress, ...]:
        """Process one look at every live rank; return the standing of all if one needs a closer look."""
        last_s, self._last_s = self._last_s, now_s
        for look in looks:
            self._follow(now_s, now_s if last_s is None else last_s, look)
        for gone in self._ranks.keys() - {look.rank for look in looks}:
            del self._ranks[gone]
        standings = tuple(self._standing(now_s, look) for look in looks)
        return standings if any(map(self._worth_a_look, standings)) else ()

    def moved_s(self, rank: int) -> float | None:
        """When a rank last moved on; None: it has ended."""
        known = self._ranks.get(rank)
        return known.moved_s if known is not None else None

    def _follow(self, now_s: float, last_s: float, look: RankSnapshot) -> None:
        """Update what is remembered of a rank; `last_s` is the time of the previous look."""
        gap = now_s - last_s > _GAP_S
        seen = (look.pid, look.armed, look.edge_s, look.steps, look.begun, look.saving)
        known = self._ranks.get(look.rank)
        if known is None or known.seen[0] != look.pid:
            moved_s = max(look.edge_s, look.armed_s) if look.armed else now_s
            known = self._ranks[look.rank] = _Rank(seen=seen, region=look.region, begun=look.begun, moved_s=moved_s)
        elif seen != known.seen:
            # It moved on by itself, so at least the time until the last look is normal.
            if known.begun and known.region is not Region.NONE and not known.was_stopped:
                self._learner.learn(known.region, last_s - known.moved_s)
            known.moved_s = look.edge_s if look.edge_s > known.moved_s else now_s
            known.seen, known.region, known.begun, known.was_stopped = seen, look.region, look.begun, False
        if look.state == "T":
            known.was_stopped = True
            known.stopped_since_s = now_s if gap or known.stopped_since_s is None else known.stopped_since_s
        else:
            known.stopped_since_s = None
        if gap:
            known.moved_s = now_s

    def _standing(self, now_s: float, look: RankSnapshot) -> RankProgress:
        known = self._ranks[look.rank]
        return RankProgress(
            rank=look.rank,
            pid=look.pid,
            region=look.region,
            steps=look.steps,
            armed=look.armed,
            begun=look.begun,
            saving=look.saving,
            quiet_s=now_s - known.moved_s,
            allowed_s=self._allowed_s(look),
            stopped_s=0.0 if known.stopped_since_s is None else now_s - known.stopped_since_s,
            left_group=look.left_group,
        )

    def _allowed_s(self, look: RankSnapshot) -> float:
        limits = self._limits
        if look.saving or not look.begun:
            return min(limits.told_patiently_s, (limits.timeout_s if look.begun else limits.first_step_s) / 2)
        return self._learner.allowed_s(look.region)

    def _worth_a_look(self, standing: RankProgress) -> bool:
        if standing.stopped_s >= self._limits.stopped_s:
            return True
        return standing.armed and standing.quiet_s >= self._limits.floor_s
