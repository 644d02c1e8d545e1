"""Samples the ranks of the current attempt: reads group.json and one shared-memory segment per rank.

Segments are opened once and read in place; their totals continue from attempt to attempt.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpulaunch.profiler.channel.segment import SegmentReader, SegmentSnapshot
from gpulaunch.profiler.files import read_file
from gpulaunch.profiler.record import AttemptGroup, RankPlace, Reading, TrainingState
from gpulaunch.profiler.samplers.facts import FactsFile
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.rank_files import RankFiles
from gpulaunch.profiler.samplers.training import counters, training

_GROUP_VERSION = 1
_NAME_CHARS = 64


class GroupFile:
    """The agent's description of the current attempt, read again when it was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self.group: AttemptGroup | None = None
        """The newest group that could be read; None before the first attempt has started, and after the run."""

    def read(self) -> str | None:
        """Check whether the group has changed; return the error if the new one cannot be read (the old one stays)."""
        try:
            stat = os.stat(self._path)
            if (seen := (stat.st_ino, stat.st_mtime_ns)) == self._seen:
                return None
            text = read_file(self._path)
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
    """Reads the segments of all ranks of the running attempt."""

    def __init__(
        self, channel_dir: Path, ledger: MonotonicTotals, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel_dir = channel_dir
        self._file = GroupFile(channel_dir / "group.json")
        self._ledger = ledger
        self._clock = clock
        self._segments = RankFiles(lambda rank: SegmentReader(str(channel_dir / f"rank-{rank}.bin")))
        self._facts: dict[int, FactsFile] = {}
        self._errors: list[str] = []

    @property
    def group(self) -> AttemptGroup | None:
        """The group as of the last reading."""
        return self._file.group

    def read(self, now: float) -> Reading[tuple[TrainingState, ...]]:
        """Return the training state of every rank in the current group."""
        errors = self._errors = []
        if (reason := self._file.read()) is not None:
            errors.append(reason)
        places = () if self.group is None else self.group.ranks
        ranks = {place.rank for place in places}
        self._segments.only(ranks)
        for rank in self._facts.keys() - ranks:
            del self._facts[rank]
        values: list[TrainingState] = []
        for place in places:
            try:
                values.append(self._segments.read(place.rank, self._state))
            except OSError as error:
                errors.append(f"segment of rank {place.rank}: {error.strerror}")
            except ValueError as error:  # SegmentError is one; so is an enum value unknown to this version
                errors.append(f"segment of rank {place.rank}: {type(error).__name__}")
        return Reading(values=tuple(values), errors=tuple(errors), late_s=self._clock() - now)

    def close(self) -> None:
        """Close all segments."""
        self._segments.close()

    def _state(self, rank: int, reader: SegmentReader) -> TrainingState:
        segment = reader.read()
        # When the segment was made tells attempts apart; when it was claimed, programs that follow each other in one
        # rank.
        source = f"{segment.anchor.monotonic_ns}:{segment.started_ns}"
        counted = counters(segment)
        return training(
            rank,
            segment,
            self._ledger.total(f"{rank}/segment", {source: counted}, width=len(counted)),
            sites=reader.sites(),
            facts=self._facts_of(rank),
            newest_checkpoint=self._newest_checkpoint(rank, segment),
        )

    def _facts_of(self, rank: int) -> Mapping[str, Any]:
        known = self._facts.get(rank)
        if known is None:
            known = self._facts[rank] = FactsFile(self._channel_dir / f"facts-{rank}.json")
        try:
            return known.read()
        except (OSError, ValueError) as error:
            self._errors.append(f"facts of rank {rank}: {type(error).__name__}")
            return {}

    def _newest_checkpoint(self, rank: int, segment: SegmentSnapshot) -> tuple[int, int] | None:
        """Return when the state of the rank's newest checkpoint was taken, and its step; None before the first.

        It is kept in the ledger, because the segment of the next attempt and the next sidecar start without it. The
        ledger keeps the highest number that it ever got: here the time is the higher part.
        """
        saved = segment.checkpoint
        told = saved.captured_ns << 64 | saved.step if saved.saves else 0
        (newest,) = self._ledger.total(f"{rank}/newest checkpoint", {"": (told,)}, width=1)
        return divmod(newest, 1 << 64) if newest else None


def parse_group(text: bytes) -> AttemptGroup:
    """Parse group.json.

    Raises:
        ValueError: it is invalid, or of another version.
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
        return AttemptGroup(
            run_id=_word(document["run_id"]),
            name=_word(document["name"]),
            attempt=_index(document["attempt"]),
            world_size=_index(document["world_size"]),
            node_rank=_index(document["node_rank"]),
            ranks=ranks,
            directory=_index(document["node"]) if "node" in document else None,
        )
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"damaged ({type(error).__name__})") from error


def _index(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("damaged (not an index)")
    return value


def _word(value: object) -> str:
    """Make a name safe for a label: a job's name is free text, and may be derived from a path."""
    if not isinstance(value, str):
        raise ValueError("damaged (not a text)")  # noqa: TRY004 - what is wrong is the document
    return re.sub(r"[^A-Za-z0-9._-]+", "_", value.rpartition("/")[2])[:_NAME_CHARS]
