"""How a measurement is told, and how measuring itself goes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Reading(Generic[T_co]):
    """What one sampler saw at one moment; trouble travels in the result, it does not break the loop."""

    values: T_co
    absent: str = ""
    """Why there is no such source on this node, if there is none: no error, but nothing that is delivered either."""
    errors: tuple[str, ...] = ()
    """What could not be read this time, one line each, without user data. A process that ended is no error."""
    late_s: float = 0.0
    """Seconds from the moment asked for until the last value was read: values carry that much uncertainty in time."""


class Sampler(Protocol[T_co]):
    """A source of measurements: one file per source, one verb."""

    def read(self, now: float) -> Reading[T_co]:
        """Give what the source says now (monotonic seconds); never blocks on a rank."""
        ...


class Collector(Enum):
    """The parts of the sidecar that can fail on their own; the value is the metric label."""

    RANKS = "ranks"
    PROCESS = "process"
    HOST = "host"
    RUN = "run"
    GPU = "gpu"
    DEVICE = "device"
    WORKERS = "workers"
    COLLECTIVES = "collectives"
    STACKS = "stacks"
    FINDINGS = "findings"
    LEDGER = "ledger"
    STORE = "store"
    """telemetry.sqlite, which somebody beside the loop writes and tells of."""


@dataclass(frozen=True, kw_only=True)
class CollectorState:
    """How one collector is doing."""

    available: bool
    reason: str
    """Why not, or what failed last; empty if nothing ever did."""
    errors: int
    spent_s: float


@dataclass(frozen=True, kw_only=True)
class SidecarState:
    """What the sidecar itself costs."""

    cpu_s: float
    rss_bytes: int | None
    refreshes: int
    late_refreshes: int
    """Refreshes that came a whole interval too late or more."""
    refresh_s: float
    """How long the refresh before this one took."""
