"""Every limit of a panel, and every reason for having none: a panel has exactly one of the two.

The numbers are those of the profiler's rules (gpulaunch.profiler.analysis.thresholds), those of the alerts in
deploy/prometheus/gpulaunch.rules.yml, which ALERTS names and a test compares, what the project promises to cost, and a
few of our own judgement. A limit is where looking begins to pay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpulaunch.profiler.analysis import thresholds as rules

GOOD: Final = "green"
WARN: Final = "orange"
BAD: Final = "red"


@dataclass(frozen=True)
class Above:
    """From these values on, rising, a figure has these colours; below the first one all is well."""

    steps: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class Below:
    """Below these values, falling, a figure has these colours; from the first one on all is well."""

    steps: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class NoLimit:
    """No number would mean anything there; the panel's description says why."""

    why: str


Limit = Above | Below | NoLimit


def above(warn: float, bad: float | None = None) -> Above:
    """Look from `warn` on; from `bad` on it is a fault."""
    return Above(((warn, WARN), *(() if bad is None else ((bad, BAD),))))


def below(warn: float, bad: float | None = None) -> Below:
    """Look below `warn`; below `bad` it is a fault."""
    return Below(((warn, WARN), *(() if bad is None else ((bad, BAD),))))


ALERTS: Final[Mapping[str, float]] = {
    "GpulaunchInputBound": 0.2,
    "GpulaunchSyncStorm": 10,
    "GpulaunchStraggler": 0.1,
    "GpulaunchShmNearlyFull": 0.85,
    "GpulaunchGpuMemoryFragmented": 0.25,
    "GpulaunchGpuThrottled": 0.1,
    "GpulaunchRestartStorm": 2,
}
"""Beyond which value of which alert a panel is red, or orange where its rule begins there, too."""

# -- pace
LOST: Final = above(rules.LOST_MEASURED.value, ALERTS["GpulaunchInputBound"])
PAUSES: Final = above(rules.LOST_MEASURED.value)
DATA: Final = above(rules.LOST.value, ALERTS["GpulaunchInputBound"])
NO_STEP: Final = above(60, 900)  # a minute is long for most steps; after a quarter of an hour GpulaunchNoProgress asks
STRAGGLES: Final = above(rules.STRAGGLES_S.value)
STRAGGLES_SHARE: Final = above(rules.LOST_MEASURED.value, ALERTS["GpulaunchStraggler"])
APART: Final = above(2)  # ranks that train together are never two steps apart
CORES: Final = above(1)  # one thread that always waits
READY: Final = below(1)  # nothing ready: the loader is behind

# -- copies, syncs, GPUs
PAGEABLE: Final = above(rules.LOST.value)
STANDING: Final = above(rules.SMALL_LOSS.value, rules.LOST.value)
SYNCS: Final = above(rules.EVERY_STEP.value, ALERTS["GpulaunchSyncStorm"])
SEEN: Final = below(0.5)  # more that is not seen than that is
LINK: Final = below(1)
IDLE: Final = below(rules.GEMM_BUSY.value)
GPU_FULL: Final = above(0.95)
THROTTLED: Final = above(rules.THROTTLED.value)  # GpulaunchGpuThrottled has the same
HOT: Final = above(85, 95)  # data centre cards begin to slow down at 85 to 90 degrees, and turn themselves off above 95
AGAIN: Final = above(1)  # a link that is well sends packets again now and then, not every second

# -- memory
NODE_FULL: Final = above(0.85, 0.95)
SHM_FULL: Final = above(rules.SHM_FULL.value, ALERTS["GpulaunchShmNearlyFull"])
PRESSURE: Final = above(rules.CROWDED_NODE.value)
FRAGMENTED: Final = above(rules.FRAGMENTED.value)  # GpulaunchGpuMemoryFragmented has the same

# -- once is enough
ONCE: Final = above(1)
FAULT: Final = Above(((1, BAD),))
RESTARTS: Final = above(1, ALERTS["GpulaunchRestartStorm"] + 1)

# -- what failures cost; runs of thousands of GPUs that published a goodput had 85 % before they cared, 95 to 97 % after
GOODPUT: Final = below(0.95, 0.85)
UNSAVED: Final = above(1800, 7200)
SAVING: Final = above(rules.LOST_MEASURED.value)

# -- what measuring costs
BUDGET: Final = above(0.005, 0.01)  # the default of --profile-budget, and twice that
SIDECAR_CORES: Final = above(0.01)  # of one core, for 8 ranks
SIDECAR_BYTES: Final = above(60e6)  # likewise
ERRORS: Final = above(1 / 60)  # one a minute
REFRESH: Final = above(1)  # as long as from one refresh to the next

# -- no limit
COUNT: Final = NoLimit("how many there should be is the job's own business.")
PACE: Final = NoLimit("how fast a program can be is its own; compare it with itself, before and after.")
PARTS: Final = NoLimit("these are parts of a whole, and some have a limit where they are shown alone.")
PARTS_GOODPUT: Final = NoLimit("these are parts of a whole; the productive part has its limit as goodput.")
TOTALS: Final = NoLimit("this adds up all ranks or nodes, and grows with their number; shares have limits.")
TOTALS_COST: Final = NoLimit("this adds up all nodes; what a sidecar takes at most has a limit above.")
COMPARED: Final = NoLimit("it compares ranks or cards with each other: who stands out is what to look at.")
SIZE: Final = NoLimit("what a program needs is its own; what is left of the nodes has limits above.")
SIZE_GPU: Final = NoLimit("what a model needs is its own; how full the cards are has one on the page of the GPUs.")
SIZE_BATCH: Final = NoLimit("the batch is the program's choice.")
SIZE_CORES: Final = NoLimit("what a program uses is its own; waiting for a core has one.")
SWAPPED: Final = NoLimit("what was swapped out once may lie there and hurt nobody; the pressure of memory has one.")
DRAWN: Final = NoLimit("the cores that there are, a line here, are it.")
OF_A_STEP: Final = NoLimit("seconds are much or little beside the length of a step; the share of it has limits above.")
SHARES: Final = NoLimit("much prep is well and much contention (from 0.3 on) is not: no number is right for both.")
PIPES: Final = NoLimit("which arithmetic a program needs is its own; the rule fp32-on-tensor-cores judges it.")
OCCUPANCY: Final = NoLimit("the best kernels may have much of it or little.")
HARDWARE: Final = NoLimit("what is right is the card's own, and differs from model to model.")
ROWS: Final = NoLimit("a card replaces some in a long life; that one waits, or could not be, has one beside.")
PACE_SIDECAR: Final = NoLimit("there are more with more nodes and more who scrape.")
PACE_STACKS: Final = NoLimit("how often stacks are taken is chosen by what it costs.")
LISTED: Final = NoLimit("it lists facts.")
FAULTS: Final = NoLimit("every line here is one to look at.")
WORDS: Final = NoLimit("these are words.")
HISTORY: Final = NoLimit("it tells how far something has come, and cannot be too much.")
HISTORY_SHARE: Final = NoLimit("it is in seconds of the time looked at; goodput is the share, and has one.")
HISTORY_SAVES: Final = NoLimit("saves are welcome; one that failed has one above.")


def described(description: str, limit: Limit) -> str:
    """Say in words why there is no limit, where there is none."""
    return f"{description} No limit: {limit.why}" if isinstance(limit, NoLimit) else description


def steps_of(limit: Limit) -> Sequence[tuple[float | None, str]]:
    """The steps as Grafana has them: rising, the first from below everything."""
    match limit:
        case Above(steps):
            return ((None, GOOD), *steps)
        case Below(steps):
            values = [value for value, _ in steps]
            colors = [color for _, color in steps]
            return ((None, colors[-1]), *zip(reversed(values), [*reversed(colors[:-1]), GOOD], strict=True))
        case NoLimit():
            return ((None, GOOD),)
