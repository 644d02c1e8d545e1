"""Whether others used the cores of a run's nodes: then its times are theirs, too. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpulaunch.exporters.view.model import Curve, RunView

PRESSURE: Final = 0.3
"""Of the time, somebody on the node waited for a core (PSI, cpu some)."""
OWN: Final = 0.75
"""Of the cores that the job may use: with less than this in use by its ranks, they do not wait for each other."""


@dataclass(frozen=True, kw_only=True)
class Crowding:
    """Of the node where it was worst."""

    pressure_ratio: float
    cores_used: float
    """By the ranks and their workers."""
    cores_allowed: float

    @property
    def crowded(self) -> bool:
        """Whether others had the cores."""
        return self.pressure_ratio >= PRESSURE and self.cores_used <= OWN * self.cores_allowed


def crowding_of(view: RunView) -> Crowding | None:
    """Say how crowded a run's nodes were; None where that is not known."""
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
