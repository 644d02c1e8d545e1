"""Whether others used the cores of a run's nodes: then its times are theirs, too."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulaunch.exporters.view.curves import Growth, axis_of, total
from gpulaunch.exporters.view.load import gather
from gpulaunch.exporters.view.source import NodeSource

__all__ = ["Crowding", "crowding_of"]

PRESSURE: Final = 0.3
"""Of the time, somebody on the node waited for a core (PSI, cpu some)."""
OWN: Final = 0.75
"""Of the cores that the job may use: with less than this in use by its ranks, they do not wait for each other."""
_MOST_ROWS: Final = 180


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


def crowding_of(run_dir: str | os.PathLike[str], *, now_s: float) -> Crowding | None:
    """Say how crowded a run's nodes were; None where that is not known. Never raises for what is in the directory."""
    parts = gather(Path(run_dir), now_s=now_s)
    try:
        known = [found for source in parts.sources if (found := _of(source)) is not None]
    finally:
        for source in parts.sources:
            source.close()
    return max(known, key=lambda each: (each.crowded, each.pressure_ratio), default=None)


def _of(source: NodeSource) -> Crowding | None:
    limits = [source.gauges.get(("gpulaunch_cpu_cores", what)) for what in ("allowed", "quota")]
    cores = min((limit for limit in limits if limit), default=None)
    axis = axis_of(*source.span, _MOST_ROWS) if source.span is not None else None
    if axis is None or cores is None:
        return None
    curves = source.curves(axis)
    waited = curves.growth("gpulaunch_node_pressure_seconds_total", "cpu", "some")
    own: list[Growth | None] = [
        curves.growth(*key) for key in source.counters if key[0] == "gpulaunch_process_cpu_seconds_total"
    ]
    used = total(own)
    if waited is None or used is None or sum(waited.covered_s) <= 0 or sum(used.covered_s) <= 0:
        return None
    return Crowding(
        pressure_ratio=sum(waited.amounts) / sum(waited.covered_s),
        cores_used=sum(used.amounts) / sum(used.covered_s),
        cores_allowed=cores,
    )
