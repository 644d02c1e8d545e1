"""Samples each rank's collectives from the file that the rank writes (`probe.collectives`, `probe.recorder`).

The rank is not queried: its values are in shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpulaunch.profiler.channel.collectives import KINDS, READABLE, UNREADABLE, CollectivesReader
from gpulaunch.profiler.record import AttemptGroup, RankCollectives, Reading
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.rank_files import RankFiles

_WIDTH: Final = len(KINDS) + 2


class CollectivesSampler:
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
        self._files = RankFiles(lambda rank: CollectivesReader(str(channel_dir / f"collectives-{rank}.bin")))
        self._attempt = 0
        self._recorders: set[int] = set()

    def read(self, now: float) -> Reading[tuple[RankCollectives, ...]]:
        """Return the collectives of every rank that has ever had one."""
        group = self._group()
        ranks = [] if group is None else [place.rank for place in group.ranks]
        self._attempt = 0 if group is None else group.attempt
        self._files.only(ranks)
        self._recorders.clear()
        values: list[RankCollectives] = []
        errors: list[str] = []
        for rank in ranks:
            try:
                state = self._files.read(rank, self._state)
            except FileNotFoundError:
                continue  # a program without torch, or it has not imported it yet
            except OSError as error:
                errors.append(f"collectives of rank {rank}: {error.strerror}")
            except ValueError as error:
                errors.append(f"collectives of rank {rank}: {type(error).__name__}")
            else:
                if state is not None:
                    values.append(state)
        # Calls are counted without it; but then the collectives of DistributedDataParallel are not known.
        absent = "torch's flight recorder cannot be asked" if self._recorders == {UNREADABLE} else ""
        return Reading(values=tuple(values), absent=absent, errors=tuple(errors), late_s=self._clock() - now)

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def _state(self, rank: int, reader: CollectivesReader) -> RankCollectives | None:
        seen = reader.read()
        counters = (*seen.calls, seen.enqueued, seen.completed)
        source = f"{seen.pid}:{seen.started_ns}"
        totals = self._ledger.total(f"{rank}/collectives", {source: counters}, width=_WIDTH)
        if not any(totals):
            return None
        self._recorders.add(seen.recorder)
        is_now = seen.attempt == self._attempt  # else its rank has not opened one yet
        *calls, enqueued, completed = totals
        recorded = bool(enqueued)
        return RankCollectives(
            rank=rank,
            calls={kind: count for kind, count in zip(KINDS, calls, strict=True) if count},
            enqueued=enqueued if recorded else None,
            completed=completed if recorded else None,
            sequence=seen.sequence if is_now and seen.recorder == READABLE else None,
            last=seen.last if is_now else None,
            running=seen.running,
        )
