"""The result of a sampler (`Reading`), the sampler protocol, and the state of collectors and sidecar."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Reading(Generic[T_co]):
    """One result of a sampler; errors are part of the result and do not break the loop."""

    values: T_co
    absent: str = ""
    """Why this node has no such source, if it has none: not an error, but there are no values."""
    errors: tuple[str, ...] = ()
    """What could not be read this time, one line each, without user data. A process that ended is not an error."""
    late_s: float = 0.0
    """Seconds from the requested time until the last value was read: the uncertainty in time of the values."""


class Sampler(Protocol[T_co]):
    """A source of measurements: one module per source, one method."""

    def read(self, now: float) -> Reading[T_co]:
        """Return the source's values at `now` (monotonic seconds); never blocks on a rank."""
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
    """telemetry.sqlite; written, and its state reported, outside the loop."""


@dataclass(frozen=True, kw_only=True)
class CollectorState:
    """How one collector is doing."""

    available: bool
    reason: str
    """Why it does not work, or the last failure; empty if there was none."""
    errors: int
    spent_s: float


@dataclass(frozen=True, kw_only=True)
class SidecarState:
    """The sidecar's own overhead."""

    cpu_s: float
    rss_bytes: int | None
    refreshes: int
    late_refreshes: int
    """Refreshes that were late by a whole interval or more."""
    refresh_s: float
    """Duration of the previous refresh."""
