"""Detects whether other processes used the cores of a run's nodes and so affected its times. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpulaunch.exporters.view.model import RunView
from gpulaunch.exporters.view.rank_model import Curve

PRESSURE: Final = 0.3
"""Share of time in which a process on the node waited for a core (PSI, cpu some)."""
OWN: Final = 0.75
"""Share of the job's cores: if its ranks use less than this, they do not wait for each other."""


@dataclass(frozen=True, kw_only=True)
class Crowding:
    """Crowding of the worst node."""

    pressure_ratio: float
    cores_used: float
    """By the ranks and their workers."""
    cores_allowed: float

    @property
    def crowded(self) -> bool:
        """Whether other processes used the cores."""
        return self.pressure_ratio >= PRESSURE and self.cores_used <= OWN * self.cores_allowed


def crowding_of(view: RunView) -> Crowding | None:
    """Return how crowded a run's nodes were; None if unknown."""
    found: list[Crowding] = []
    for node in view.nodes:
        limits = [limit for name in ("cores_allowed", "cores_quota") if (limit := node.values.get(name))]
        waited, used = _mean(node.cpu_pressure_ratio), _mean(node.cores_used)
        if limits and waited is not None and used is not None:
            found.append(Crowding(pressure_ratio=waited, cores_used=used, cores_allowed=min(limits)))
    return max(found, key=lambda each: (each.crowded, each.pressure_ratio), default=None)


def _mean(curve: Curve) -> float | None:
    known = [value for value in curve if value is not None]
    return sum(known) / len(known) if known else None
