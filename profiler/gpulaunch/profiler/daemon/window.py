"""Computes the time window of a trace: its length, its start, which rank to trace, its overhead. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeVar

from gpulaunch.profiler.channel.ring import StepEvent
from gpulaunch.profiler.daemon.kineto import ASKS_EVERY_S

LONGEST_S: Final = 60.0
"""A trace of a minute is gigabytes already, and all of it is in the rank's memory before it is written."""
_SHORTEST_S: Final = 0.05
_SLOWED: Final = 1.5
"""The slowdown of a recorded step up to which the wanted number of steps still fits."""
RANK_CHECKS_EVERY_S: Final = 1.0
"""A rank checks about once a second, at the end of a step, whether a trace is requested (`probe.kineto`)."""
KINETO_PREPARES_S: Final = 2.0
"""Kineto's own loop runs once a second; an order that arrives less than two turns before its start may be missed."""
_SLACK_S: Final = 0.5
_NOISES: Final = 2.0
_NOISE_FLOOR: Final = 0.02
"""Steps may differ by this share although the sampled ones did not."""
_SIGMAS_PER_MAD: Final = 1.4826  # of a normal distribution
_FEWEST_STEPS: Final = 5
_WAITS: Final = ("backward", "comm", "sync")
"""Phases in which a rank may wait because others are late."""


class Timed(Protocol):
    """Anything with a start and a duration: a `StepEvent`, or a `Span` of it."""

    @property
    def start_ns(self) -> int:
        """CLOCK_MONOTONIC."""
        ...

    @property
    def duration_ns(self) -> int:
        """How long it takes."""
        ...


T = TypeVar("T", bound=Timed)


class Span(NamedTuple):
    """Start and duration of a step; small, because a trace may cover very many."""

    step: int
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, kw_only=True)
class Window:
    """When a trace is made; the same for all ranks."""

    start_ns: int
    """CLOCK_MONOTONIC."""
    end_ns: int
    orders_ns: int
    """Latest time at which a rank may get its order; a later one may be missed."""
    warmup_s: int

    def before(self, steps: Iterable[T]) -> list[T]:
        """Steps that ended before the last orders may have been sent."""
        return [step for step in steps if _end_ns(step) <= self.orders_ns]

    def inside(self, steps: Iterable[T]) -> list[T]:
        """Steps that lie entirely in it."""
        return [step for step in steps if self.start_ns <= step.start_ns and _end_ns(step) <= self.end_ns]

    def touched(self, steps: Iterable[T]) -> list[T]:
        """Steps that overlap it."""
        return [step for step in steps if step.start_ns < self.end_ns and self.start_ns < _end_ns(step)]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How long the steps of a rank take."""

    step_s: float
    """Median."""
    noise_s: float
    """A robust standard deviation of the steps."""
    num_steps: int


def window(now_ns: int, *, step_s: float, duration_s: float, has_gpu: bool) -> Window:
    """The next window that all ranks can begin together.

    `step_s`: of the slowest rank, since a rank learns of a trace at the end of a step. The first recording on a GPU is
    slow and is discarded: such a trace has a second of warm-up.
    """
    warmup_s = 1 if has_gpu else 0
    orders_s = step_s + RANK_CHECKS_EVERY_S + ASKS_EVERY_S + _SLACK_S
    orders_ns = now_ns + round(orders_s * 1e9)
    start_ns = orders_ns + round((KINETO_PREPARES_S + warmup_s) * 1e9)
    return Window(
        start_ns=start_ns,
        end_ns=start_ns + round(duration_s * 1e9),
        orders_ns=orders_ns,
        warmup_s=warmup_s,
    )


def length_s(num_steps: int, speed: Speed) -> float:
    """The window length that holds this many whole steps, wherever in a step it begins, even if steps are slow."""
    return max(_SHORTEST_S, (num_steps + 1) * (speed.step_s + _NOISES * speed.noise_s) * _SLOWED)


def speed_of(steps: Iterable[Timed]) -> Speed | None:
    """The speed of these steps; None if there are none."""
    durations_s = [step.duration_ns / 1e9 for step in steps]
    if not durations_s:
        return None
    step_s = statistics.median(durations_s)
    spread_s = statistics.median(abs(duration_s - step_s) for duration_s in durations_s)
    return Speed(step_s=step_s, noise_s=spread_s * _SIGMAS_PER_MAD, num_steps=len(durations_s))


def is_back(before: Speed, after: Speed) -> bool | None:
    """Whether the rank is as fast as before, within twice its noise; None: too few steps to tell."""
    if min(before.num_steps, after.num_steps) < _FEWEST_STEPS:
        return None
    return after.step_s <= before.step_s + max(_NOISES * before.noise_s, _NOISE_FLOOR * before.step_s)


def slowest(steps: Mapping[int, Sequence[StepEvent]]) -> int:
    """The rank that the others wait for: the one that spends the most time on its own work.

    All ranks of a job take equally long for a step, because the fast ones wait for the slow one. They do so within a
    backward (where DDP's collectives are), a collective or a synchronisation.
    """
    return max(sorted(steps), key=lambda rank: _own_s(steps[rank]))


def _own_s(events: Sequence[StepEvent]) -> float:
    own_ns = (event.duration_ns - sum(event.phase_ns.get(phase, 0) for phase in _WAITS) for event in events)
    return statistics.median(own_ns) / 1e9 if events else -1.0


def _end_ns(step: Timed) -> int:
    return step.start_ns + step.duration_ns
