"""When to look closer: every rank's quiet time against its allowance, once a second. Pure; the caller brings the time.

    rank                                             looked at after     beyond its allowance after
    stopped by a signal (state T)                    stopped_s           the same
    without a probe, or whose probe has given up     never               never
    before its first edge                            floor               first_step_s
    before its first step has ended                  floor               first_step_s
    in OTHER (validation, logging), or in a save     floor               the cap
    in LOADER, FORWARD, BACKWARD, STEPPING, OPTIMIZER  floor             learnt: safety x longest, floor .. cap

To look costs a few milliseconds of a helper process and the rank nothing, so it begins at the floor; only what is
beyond its allowance is told to people as a suspicion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpulaunch.launcher.hang.learn import Learner
from gpulaunch.launcher.hang.values import Limits, Standing
from gpulaunch.profiler.channel.layout import Region

__all__ = ["Look", "Suspicion", "Watch"]

_GAP_S = 5.0
"""The caller comes once a second; after a longer gap it was stopped or starved itself, and perhaps all the rest too."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What can be seen of one live rank without disturbing it."""

    rank: int
    pid: int
    state: str
    """State letter; "" where nobody looked because the rank moves."""
    armed: bool = False
    region: Region = Region.NONE
    edge_s: float = 0.0
    """When its training thread passed the last edge; 0: never."""
    armed_s: float = 0.0
    steps: int = 0
    begun: bool = False
    saving: bool = False


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """Some rank has been quiet for long enough to be looked into."""

    standings: tuple[Standing, ...]
    """All live ranks: a rank alone means nothing."""
    beyond: tuple[int, ...]
    """Those beyond their allowance; empty: quiet for a while, with a reason."""
    sentence: str


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
    """Since it last moved: then how long it took is not normal."""


class Watch:
    """Remembers when each rank last moved, learns, and says who is quiet for too long."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._learner = Learner(limits)
        self._ranks: dict[int, _Rank] = {}
        self._last_s: float | None = None

    def tick(self, now_s: float, looks: Sequence[Look]) -> Suspicion | None:
        """Take one look at every live rank; None while all is well, and again once it is."""
        last_s, self._last_s = self._last_s, now_s
        for look in looks:
            self._follow(now_s, now_s if last_s is None else last_s, look)
        for gone in self._ranks.keys() - {look.rank for look in looks}:
            del self._ranks[gone]
        standings = [self._standing(now_s, look) for look in looks]
        if not any(self._worth_a_look(standing) for standing in standings):
            return None
        beyond = [standing for standing in standings if self._beyond(standing)]
        return Suspicion(
            standings=tuple(standings),
            beyond=tuple(standing.rank for standing in beyond),
            sentence="; ".join(map(_words, beyond[:8])),
        )

    def _follow(self, now_s: float, last_s: float, look: Look) -> None:
        """Bring what is remembered of a rank up to date; `last_s` is when it was looked at before this."""
        gap = now_s - last_s > _GAP_S
        seen = (look.pid, look.armed, look.edge_s, look.steps, look.begun, look.saving)
        known = self._ranks.get(look.rank)
        if known is None or known.seen[0] != look.pid:
            moved_s = max(look.edge_s, look.armed_s) if look.armed else now_s
            known = self._ranks[look.rank] = _Rank(seen=seen, region=look.region, begun=look.begun, moved_s=moved_s)
        elif seen != known.seen:
            # It moved on by itself, so what it took until the last look at least is normal.
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

    def _standing(self, now_s: float, look: Look) -> Standing:
        known = self._ranks[look.rank]
        return Standing(
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
        )

    def _allowed_s(self, look: Look) -> float:
        if not look.begun:
            return self._limits.first_step_s
        if look.saving:
            return self._limits.cap_s
        return self._learner.allowed_s(look.region)

    def _worth_a_look(self, standing: Standing) -> bool:
        if standing.stopped_s >= self._limits.stopped_s:
            return True
        return standing.armed and standing.quiet_s >= min(self._limits.floor_s, standing.allowed_s)

    def _beyond(self, standing: Standing) -> bool:
        if standing.stopped_s >= self._limits.stopped_s:
            return True
        return standing.armed and standing.quiet_s >= standing.allowed_s


def _words(standing: Standing) -> str:
    if standing.stopped_s:
        return f"rank {standing.rank} has been stopped by a signal (state T) for {standing.stopped_s:.0f} s"
    where = standing.region.name.lower() if standing.begun else "before the end of its first step"
    return (
        f"rank {standing.rank} has not moved for {standing.quiet_s:.0f} s ({where}; "
        f"{standing.allowed_s:.0f} s would be normal)"
    )
