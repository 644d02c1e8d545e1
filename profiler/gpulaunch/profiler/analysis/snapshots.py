"""Cuts the snapshots of a run into windows, each with a longer one before it and the memory trend since the start.

A new attempt starts from scratch: its first steps, its memory and its lines are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gpulaunch.profiler.analysis.difference import between
from gpulaunch.profiler.analysis.thresholds import (
    LONG_S,
    SHORT_RUN_S,
    SLOW_WINDOW_S,
    SLOW_WINDOW_STEPS,
    WARM_UP_STEPS,
    WINDOW_S,
    WINDOW_STEPS,
)
from gpulaunch.profiler.analysis.trend import Series
from gpulaunch.profiler.analysis.window import MemoryPoint, Snapshot, Window
from gpulaunch.profiler.record import GpuState, RankProcesses, Role, TrainingState, Usage

_MEMORY_POINTS: Final = 24
_UTILIZATION: Final = "utilization"


class Snapshots:
    """Takes every snapshot and returns a window whenever one is complete."""

    def __init__(self) -> None:
        self._run: object = None
        self._began: Snapshot | None = None
        self._base: Snapshot | None = None
        self._long: Snapshot | None = None
        self._next_long: Snapshot | None = None
        self._latest: Snapshot | None = None
        self._least = _Least()
        self._means = _Means()
        self._memory: dict[int, Series[MemoryPoint]] = {}

    def look(self, snapshot: Snapshot) -> Window | None:
        """Take a snapshot; return the window that ends with it, if one does."""
        group = snapshot.state.group
        if group is None:
            return None
        if (run := (group.run_id, group.attempt)) != self._run:
            self._run = run
            self._began, self._base, self._latest, self._memory = snapshot, None, None, {}
            self._forget_lows()
        self._least.see(snapshot)
        self._means.see(snapshot)
        if self._began is None or not self._began.state.training:
            self._began = snapshot  # the segments did not exist yet
        if self._base is None:
            if _steps(self._began, snapshot) >= WARM_UP_STEPS.value:
                self._base = self._long = self._next_long = snapshot
                self._forget_lows()
            return None
        if not _steps(self._latest or self._base, snapshot):
            return None  # after the last step, what the program does is no part of one, and its processes end
        devices = self._means.of(snapshot.state.devices)
        self._latest = replace(snapshot, state=replace(snapshot.state, devices=devices))
        return self._close(self._base, self._latest) if _is_over(self._base, self._latest) else None

    def short_run(self) -> Window | None:
        """Return all steps of the attempt after the warm-up as one window; None if they are too few for a verdict."""
        if self._long is None or self._latest is None:
            return None
        seconds = _seconds(self._long, self._latest)
        if seconds < SHORT_RUN_S.value:
            return None
        return between(self._long, self._latest, least_steps=_least_steps(seconds))

    def last_window(self) -> Window | None:
        """Return the steps since the last window, and since the begin of the long one; None if there are too few."""
        if self._base is None or self._long is None or self._latest is None:
            return None
        least = int(SLOW_WINDOW_STEPS.value)
        if _steps(self._base, self._latest) < least:
            return None
        longer = between(self._long, self._latest, least_steps=least)
        return replace(between(self._base, self._latest, least_steps=least), longer=longer)

    def _close(self, base: Snapshot, snapshot: Snapshot) -> Window:
        for rank, point in self._least.points(snapshot).items():
            self._memory.setdefault(rank, Series(_MEMORY_POINTS)).add(point)
        memory = {rank: series.points for rank, series in self._memory.items()}
        window = between(base, snapshot, least_steps=int(SLOW_WINDOW_STEPS.value), memory=memory)
        if self._long is not None and self._long is not base:
            longer = between(self._long, snapshot, least_steps=int(SLOW_WINDOW_STEPS.value), memory=memory)
            window = replace(window, longer=longer)
        # Two earlier snapshots are kept: the window from the older one is between half and all of LONG_S long.
        if self._next_long is not None and _seconds(self._next_long, snapshot) >= LONG_S.value / 2:
            self._long, self._next_long = self._next_long, snapshot
        self._base = snapshot
        self._forget_lows()
        return window

    def _forget_lows(self) -> None:
        self._least = _Least()
        self._means = _Means()


def _seconds(before: Snapshot, after: Snapshot) -> float:
    return (after.state.taken_monotonic_ns - before.state.taken_monotonic_ns) / 1e9


def _steps(before: Snapshot, after: Snapshot) -> int:
    """Steps of the rank that made the most."""
    were = {training.rank: training.steps for training in before.state.training}
    return max((each.steps - were.get(each.rank, each.steps) for each in after.state.training), default=0)


def _is_over(base: Snapshot, snapshot: Snapshot) -> bool:
    seconds = _seconds(base, snapshot)
    return seconds >= WINDOW_S.value and _steps(base, snapshot) >= _least_steps(seconds)


def _least_steps(seconds: float) -> int:
    """How many steps are enough for a verdict in so many seconds."""
    return int((WINDOW_STEPS if seconds < SLOW_WINDOW_S.value else SLOW_WINDOW_STEPS).value)


@dataclass(frozen=True, kw_only=True)
class _Held:
    """Memory that a rank held; None: not known."""

    trainer_bytes: int | None
    trainer_virtual_bytes: int | None
    workers_bytes: int | None
    workers_allocated_bytes: int | None
    workers_alive: int
    gpu_bytes: int | None


class _Least:
    """The minimum of each rank's sampled memory. Between two steps it is lower than within them."""

    def __init__(self) -> None:
        self._lows: dict[int, _Held] = {}

    def see(self, snapshot: Snapshot) -> None:
        processes = {each.rank: each for each in snapshot.state.processes}
        for training in snapshot.state.training:
            now = _held(training, processes.get(training.rank))
            low = self._lows.get(training.rank, now)
            self._lows[training.rank] = _Held(
                trainer_bytes=_least_of(low.trainer_bytes, now.trainer_bytes),
                trainer_virtual_bytes=_least_of(low.trainer_virtual_bytes, now.trainer_virtual_bytes),
                workers_bytes=_least_of(low.workers_bytes, now.workers_bytes),
                workers_allocated_bytes=_least_of(low.workers_allocated_bytes, now.workers_allocated_bytes),
                workers_alive=now.workers_alive,
                gpu_bytes=_least_of(low.gpu_bytes, now.gpu_bytes),
            )

    def points(self, snapshot: Snapshot) -> dict[int, MemoryPoint]:
        steps = {each.rank: each.steps for each in snapshot.state.training}
        return {
            rank: MemoryPoint(
                at_s=snapshot.state.taken_monotonic_ns / 1e9,
                steps=steps.get(rank, 0),
                trainer_bytes=low.trainer_bytes,
                trainer_virtual_bytes=low.trainer_virtual_bytes,
                workers_bytes=low.workers_bytes,
                workers_allocated_bytes=low.workers_allocated_bytes,
                workers_alive=low.workers_alive,
                gpu_bytes=low.gpu_bytes,
            )
            for rank, low in self._lows.items()
        }


def _held(training: TrainingState, processes: RankProcesses | None) -> _Held:
    usage: Mapping[Role, Usage] = {} if processes is None else processes.usage
    trainer, workers = usage.get(Role.TRAINER), usage.get(Role.WORKERS)
    trainer_bytes = None if trainer is None else trainer.anonymous_bytes
    if trainer_bytes is not None and processes is not None and processes.shm_inflight_bytes is not None:
        # Batches made by workers are in shared memory as long as the rank keeps them.
        trainer_bytes += sum(processes.shm_inflight_bytes.values())
    return _Held(
        # Not the pages of files: a mapped dataset fills the page cache, and the kernel reclaims that.
        trainer_bytes=trainer_bytes,
        trainer_virtual_bytes=None if trainer is None else trainer.virtual_bytes,
        # Workers share most of their pages with the trainer: only the proportional size shows what is theirs alone, and
        # grows with the pages that they copy. What they allocate shows in the other, which is read more often.
        workers_bytes=None if workers is None else workers.pss_anonymous_bytes,
        workers_allocated_bytes=None if workers is None else workers.anonymous_bytes,
        workers_alive=0 if processes is None else processes.workers_alive,
        gpu_bytes=None if training.gpu is None else training.gpu.allocated_bytes,
    )


def _least_of(known: int | None, new: int | None) -> int | None:
    return new if known is None else known if new is None else min(known, new)


@dataclass
class _Means:
    """Means of the sampled GPU ratios: one sample covers the last second, a window has several."""

    sums: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict[tuple[str, str], tuple[float, int]])

    def see(self, snapshot: Snapshot) -> None:
        for gpu in snapshot.state.devices:
            known = {} if gpu.utilization_ratio is None else {_UTILIZATION: gpu.utilization_ratio}
            for name, ratio in {**gpu.gpm_ratios, **known}.items():
                total, count = self.sums.get((gpu.uuid, name), (0.0, 0))
                self.sums[gpu.uuid, name] = total + ratio, count + 1

    def of(self, gpus: tuple[GpuState, ...]) -> tuple[GpuState, ...]:
        return tuple(
            replace(
                gpu,
                utilization_ratio=self._mean(gpu, _UTILIZATION, gpu.utilization_ratio),
                gpm_ratios={name: self._mean(gpu, name, ratio) or 0.0 for name, ratio in gpu.gpm_ratios.items()},
            )
            for gpu in gpus
        )

    def _mean(self, gpu: GpuState, name: str, now: float | None) -> float | None:
        total, count = self.sums.get((gpu.uuid, name), (0.0, 0))
        return total / count if count else now
