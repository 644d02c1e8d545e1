"""What the ranks have published: the group of the running attempt, and one shared-memory page per rank.

Pages are mapped once and read in place; a page that the agent replaced (a new attempt) is read a last time before the
new one is opened, so the steps made since the refresh before are counted.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpulaunch.profiler.channel import layout
from gpulaunch.profiler.channel.page import PageReader, PageSnapshot
from gpulaunch.profiler.record import (
    CheckpointState,
    GpuMemory,
    Group,
    LoaderState,
    RankPlace,
    Reading,
    TrainingState,
)
from gpulaunch.profiler.samplers.ledger import Ledger

_GROUP_VERSION = 1
_NAME_CHARS = 64


class GroupFile:
    """The agent's description of the running attempt, read again when it has been replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self.group: Group | None = None
        """The newest group that could be read; None before the first attempt has started, and after the run."""

    def read(self) -> str | None:
        """Look whether the group has changed; give the reason if it has and cannot be read (the old one stays)."""
        try:
            stat = os.stat(self._path)
            if (seen := (stat.st_ino, stat.st_mtime_ns)) == self._seen:
                return None
            text = self._path.read_bytes()
        except FileNotFoundError:
            self._seen = self.group = None
            return None
        except OSError as error:
            return f"group.json: {error.strerror}"
        self._seen = seen
        try:
            self.group = parse_group(text)
        except ValueError as error:
            return f"group.json: {error}"
        return None


class RankSampler:
    """Reads the pages of all ranks of the running attempt."""

    def __init__(self, channel_dir: Path, ledger: Ledger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel_dir = channel_dir
        self._file = GroupFile(channel_dir / "group.json")
        self._ledger = ledger
        self._clock = clock
        self._readers: dict[int, PageReader] = {}

    @property
    def group(self) -> Group | None:
        """The group as of the last reading."""
        return self._file.group

    def read(self, now: float) -> Reading[tuple[TrainingState, ...]]:
        """Give the training state of every rank; a rank that is not in the group any more is not in the values."""
        errors: list[str] = []
        if (reason := self._file.read()) is not None:
            errors.append(reason)
        places = () if self.group is None else self.group.ranks
        for rank in self._readers.keys() - {place.rank for place in places}:
            self._readers.pop(rank).close()
        values: list[TrainingState] = []
        for place in places:
            try:
                values.append(self._read_rank(place.rank))
            except OSError as error:
                errors.append(f"page of rank {place.rank}: {error.strerror}")
            except ValueError as error:  # PageError is one; so is a value that this version has no name for
                errors.append(f"page of rank {place.rank}: {type(error).__name__}")
        return Reading(values=tuple(values), errors=tuple(errors), late_s=self._clock() - now)

    def close(self) -> None:
        """Unmap all pages."""
        while self._readers:
            self._readers.popitem()[1].close()

    def _read_rank(self, rank: int) -> TrainingState:
        reader = self._readers.get(rank)
        if reader is not None and reader.replaced():
            del self._readers[rank]
            with reader:
                self._state(rank, reader.read())
            reader = None
        if reader is None:
            reader = self._readers[rank] = PageReader(str(self._channel_dir / f"rank-{rank}.bin"))
        return self._state(rank, reader.read())

    def _state(self, rank: int, page: PageSnapshot) -> TrainingState:
        counters = _counters(page)
        # When the page was made tells attempts apart; when it was claimed, programs that follow each other in one rank.
        source = f"{page.anchor.monotonic_ns}:{page.started_ns}"
        totals = self._ledger.total(f"{rank}/page", {source: counters}, width=len(counters))
        return _training(rank, page, totals, newest=self._newest_checkpoint(rank, page))

    def _newest_checkpoint(self, rank: int, page: PageSnapshot) -> tuple[int, int] | None:
        """Give when the state of the rank's newest checkpoint was taken, and its step; None before the first.

        The next attempt's page knows nothing of it, and neither does the next sidecar; the ledger does. It keeps the
        highest number that it was ever told: here the time is the higher part.
        """
        told = page.checkpoint_captured_ns << 64 | page.checkpoint_step if page.checkpoint_saves else 0
        (newest,) = self._ledger.total(f"{rank}/newest checkpoint", {"": (told,)}, width=1)
        return divmod(newest, 1 << 64) if newest else None


def _counters(page: PageSnapshot) -> tuple[int, ...]:
    """Give everything in a page that only grows, in the order in which `_training` takes it apart."""
    return (
        page.steps,
        page.microsteps,
        page.samples,
        page.skipped_steps,
        page.step_ns_total,
        page.probe_ns_total,
        page.loader_batches,
        *(page.phase_ns[phase] for phase in layout.PHASES),
        *page.step_histogram_counts,
        page.checkpoint_saves,
        page.checkpoint_failures,
        page.checkpoint_stall_ns_total,
        page.checkpoint_bytes_total,
    )


def _training(
    rank: int, page: PageSnapshot, totals: tuple[int, ...], *, newest: tuple[int, int] | None
) -> TrainingState:
    steps, microsteps, samples, skipped_steps, step_ns, probe_ns, batches, *rest = totals
    phases, rest = rest[: len(layout.PHASES)], rest[len(layout.PHASES) :]
    histogram, saving = rest[: layout.STEP_BUCKETS], rest[layout.STEP_BUCKETS :]
    loader = gpu = checkpoint = None
    if batches or page.loader_outstanding or page.loader_workers_configured:
        loader = LoaderState(
            ready=page.loader_ready,
            outstanding=page.loader_outstanding,
            reorder_blocked=page.loader_reorder_blocked,
            workers_configured=page.loader_workers_configured,
            batches=batches,
        )
    if page.gpu_reserved_bytes or page.gpu_allocated_bytes or page.gpu_peak_allocated_bytes:
        gpu = GpuMemory(
            allocated_bytes=page.gpu_allocated_bytes,
            reserved_bytes=page.gpu_reserved_bytes,
            peak_allocated_bytes=page.gpu_peak_allocated_bytes,
        )
    if page.listens or page.resumed_step or any(saving):
        saves, failures, stall_ns, size_bytes = saving
        captured_ns, step = newest or (None, None)
        checkpoint = CheckpointState(
            saves=saves,
            failures=failures,
            stall_ns_total=stall_ns,
            bytes_total=size_bytes,
            newest_step=step,
            captured_monotonic_ns=captured_ns,
            resumed_step=page.resumed_step or None,
        )
    return TrainingState(
        rank=rank,
        armed=page.armed,
        steps=steps,
        microsteps=microsteps,
        samples=samples,
        skipped_steps=skipped_steps,
        step_ns_total=step_ns,
        step_bounds_s=layout.STEP_BOUNDS_S,
        step_counts=tuple(histogram),
        phase_ns=dict(zip(layout.PHASES, phases, strict=True)),
        probe_ns_total=probe_ns,
        step_source=page.step_source.name.lower() if page.step_source else None,
        last_step_monotonic_ns=page.last_step_monotonic_ns or None,
        loader=loader,
        gpu=gpu,
        checkpoint=checkpoint,
    )


def parse_group(text: bytes) -> Group:
    """Read group.json.

    Raises:
        ValueError: it is not one, or of another version.
    """
    try:
        document: Any = json.loads(text)
        version = document["version"]
        if version != _GROUP_VERSION:
            raise ValueError(f"version {version!r}, this sidecar knows {_GROUP_VERSION}")
        ranks = tuple(
            RankPlace(rank=_index(place["rank"]), local_rank=_index(place["local_rank"]), pid=_index(place["pid"]))
            for place in document["ranks"]
        )
        return Group(
            run_id=_word(document["run_id"]),
            name=_word(document["name"]),
            attempt=_index(document["attempt"]),
            world_size=_index(document["world_size"]),
            node_rank=_index(document["node_rank"]),
            ranks=ranks,
        )
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"damaged ({type(error).__name__})") from error


def _index(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("damaged (not an index)")
    return value


def _word(value: object) -> str:
    """Give a name fit for a label: a job's name is free text, and may have been made from a path."""
    if not isinstance(value, str):
        raise ValueError("damaged (not a text)")  # noqa: TRY004 - what is wrong is the document
    return re.sub(r"[^A-Za-z0-9._-]+", "_", value.rpartition("/")[2])[:_NAME_CHARS]
