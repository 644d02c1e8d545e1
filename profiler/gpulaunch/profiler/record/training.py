"""Data types of one rank's training loop: its steps, and where their time goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpulaunch.profiler.channel.quantities import (
    CheckpointState,
    CopyTotals,
    GpuMemory,
    GpuTime,
    LoaderState,
    Pauses,
    StepTotals,
    SyncTotals,
)
from gpulaunch.profiler.channel.segment import Site


@dataclass(frozen=True, kw_only=True)
class TrainingState(StepTotals):
    """One rank's training loop. Counts and sums cover all attempts of the run; gauges are the current attempt's."""

    rank: int
    armed: bool
    """Whether the probe is armed in the rank: without torch it never is, and then all counts stay 0."""
    step_bounds_s: tuple[float, ...]
    """Upper bounds of the step duration buckets; the last bucket (above them all) has none."""
    step_source: str | None
    last_step_monotonic_ns: int | None
    loader: LoaderState | None
    gpu: GpuMemory | None
    gpu_time: GpuTime | None
    checkpoint: CheckpointState | None
    """Its newest checkpoint is that of any attempt."""
    copies: Mapping[tuple[str, str], CopyTotals]
    """By direction and host memory, as `channel.layout.COPIES`; only those that occurred."""
    syncs: Mapping[str, SyncTotals]
    """By `channel.layout.SYNCS`; only those that occurred."""
    sites: tuple[Site, ...]
    pauses: Pauses
    facts: Mapping[str, Any]
    """The rank's facts about its environment, as written by `probe.facts`; empty before that."""
    hooks_unavailable: tuple[str, ...]
    """Parts of the probe that are unavailable, lower case."""
    fault: str
    """Why the last of them is unavailable."""
