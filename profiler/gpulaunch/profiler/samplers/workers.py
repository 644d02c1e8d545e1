"""Samples where the time of each rank's dataloader workers goes, as they report it (`probe.worker`).

Workers are restarted, and files are replaced with each attempt; the totals continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gpulaunch.profiler.channel.workers import COUNTERS, WorkersReader
from gpulaunch.profiler.record import AttemptGroup, LoaderWorkers, Reading
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.rank_files import RankFiles


class WorkersSampler:
    """Reads the files of all ranks of the running attempt."""

    def __init__(
        self,
        group: Callable[[], AttemptGroup | None],
        channel_dir: Path,
        ledger: MonotonicTotals,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._ledger = ledger
        self._clock = clock
        self._pids: Mapping[int, tuple[int, ...]] = {}
        self._files = RankFiles(lambda rank: WorkersReader(str(channel_dir / f"workers-{rank}.bin")))

    def read(self, now: float) -> Reading[tuple[LoaderWorkers, ...]]:
        """Return the workers of every rank that has ever had a measured one."""
        group = self._group()
        ranks = [] if group is None else [place.rank for place in group.ranks]
        self._files.only(ranks)
        values: list[LoaderWorkers] = []
        pids: dict[int, tuple[int, ...]] = {}
        errors: list[str] = []
        for rank in ranks:
            try:
                workers, pids[rank] = self._files.read(rank, self._sum)
            except FileNotFoundError:
                continue  # the agent could not create it; the rank's segment shows that its workers are not measured
            except OSError as error:
                errors.append(f"workers of rank {rank}: {error.strerror}")
            except ValueError as error:
                errors.append(f"workers of rank {rank}: {type(error).__name__}")
            else:
                if workers.wall_ns or workers.alive:
                    values.append(workers)
        self._pids = pids
        return Reading(values=tuple(values), errors=tuple(errors), late_s=self._clock() - now)

    def pids(self, rank: int) -> tuple[int, ...]:
        """The live workers of a rank at the last reading. Any thread may ask."""
        return self._pids.get(rank, ())

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def _sum(self, rank: int, reader: WorkersReader) -> tuple[LoaderWorkers, tuple[int, ...]]:
        slots = reader.read()
        counters = [sum(getattr(slot, name) for slot in slots) for name in COUNTERS]
        totals = self._ledger.total(f"{rank}/loader workers", {str(reader.made_ns): counters}, width=len(COUNTERS))
        workers = LoaderWorkers(
            rank=rank,
            alive=sum(slot.alive for slot in slots),
            knows_runqueue=all(slot.knows_runqueue for slot in slots),
            **dict(zip(COUNTERS, totals, strict=True)),
        )
        return workers, tuple(slot.pid for slot in slots if slot.alive)
