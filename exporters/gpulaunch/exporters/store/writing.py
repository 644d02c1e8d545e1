"""Writes telemetry.sqlite: adds samples, downsamples them with age, and keeps the file within its limits.

Coarse rows are made from the finer rows in the file, not from process memory: a killed sidecar loses only its last
sample, and the next sidecar continues seamlessly.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import zlib
from array import array
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from gpulaunch.exporters.store.bounded import bounded_json
from gpulaunch.exporters.store.frame import Frame, decode, encode, fold
from gpulaunch.exporters.store.limits import (
    MOST_DOCUMENT_BYTES,
    MOST_DOCUMENTS,
    MOST_FAILURES,
    MOST_FINDINGS,
    MOST_SERIES,
    Limits,
)
from gpulaunch.exporters.store.locations import is_shared
from gpulaunch.exporters.store.schema import open_to_write
from gpulaunch.exporters.store.series import NUMBERS, Key, Sample
from gpulaunch.profiler.record import AttemptGroup, Finding

_LOOKS_AT_AGES_EVERY_S: Final = 5.0
_APART_S: Final = 0.5
_APART_SHARED_S: Final = 4.5
"""On a network file system: without a write-ahead log every sample waits for the server twice."""
_FRAME: Final = "id, begin_s, end_s, run, attempt, looks, num_counters, data"


class HeldByReaderError(Exception):
    """A reader blocks the checkpoint of the write-ahead log, which has reached its size limit."""


class TelemetryFile:
    """The file of one node, open for writing. After any error, close and reopen it: no partial write is in it."""

    def __init__(self, path: Path, limits: Limits | None = None) -> None:
        """Open the file. Raises what `schema.open_to_write` raises."""
        self.path = path
        self._limits = limits or Limits()
        self._connection = open_to_write(path, self._limits)
        self.apart_s = _APART_SHARED_S if is_shared(path) else _APART_S
        """Minimum distance of samples: each is committed durably."""
        try:
            self._slots: tuple[dict[Key, int], dict[Key, int]] = ({}, {})
            for counts, slot, name, labels in self._connection.execute("SELECT * FROM series ORDER BY slot"):
                self._slots[counts][(name, *json.loads(labels))] = slot
            self._held_bytes = dict.fromkeys(range(len(self._limits.levels)), 0)
            self._held_rows = dict(self._held_bytes)
            for level, count, held in self._connection.execute(
                "SELECT level, count(*), sum(length(data)) FROM frame GROUP BY level"
            ):
                self._held_rows[level], self._held_bytes[level] = count, held
            newest = self._connection.execute("SELECT max(end_s) FROM frame WHERE level = 0").fetchone()[0]
        except BaseException:
            self._connection.close()
            raise
        self.newest_s: float | None = newest
        """The end of the newest row."""
        self._aged_s = -math.inf
        self._runs: dict[str, int] = {}

    def __enter__(self) -> TelemetryFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Checkpoint everything into the one file, and close it. Never raises."""
        with contextlib.suppress(sqlite3.Error):
            # Without a write-ahead log the file can be copied, and read in a read-only directory. While there is a
            # reader this fails; the next process to open the file finds it complete all the same.
            self._connection.execute("PRAGMA busy_timeout=100")
            self._connection.execute("PRAGMA journal_mode=DELETE")
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    @contextlib.contextmanager
    def writing(self) -> Generator[None]:
        """Run a transaction: all that is written in it, or nothing.

        Raises:
            HeldByReaderError: not possible now.
            sqlite3.Error: the write failed.
        """
        self._check_ahead()
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    # -- what is written

    def run_of(self, group: AttemptGroup, *, host: str, now_s: float) -> int:
        """Return the row id of a launcher run."""
        known = self._runs.get(group.run_id)
        if known is None:
            self._connection.execute(
                "INSERT OR IGNORE INTO run (run_id, name, node, world_size, host, began_s) VALUES (?, ?, ?, ?, ?, ?)",
                (group.run_id, group.name, group.node, group.world_size, host, now_s),
            )
            found = self._connection.execute("SELECT id FROM run WHERE run_id = ?", (group.run_id,))
            known = self._runs[group.run_id] = int(found.fetchone()[0])
        return known

    def look(self, sample: Sample, *, run: int, attempt: int | None, begin_s: float, end_s: float) -> None:
        """Add the sample of `end_s`; older rows are downsampled or deleted as due."""
        numbers = {key: value for key, value in sample.gauges.items() if key[0] in NUMBERS}
        gauges = self._placed(0, {key: value for key, value in sample.gauges.items() if key not in numbers})
        frame = Frame(
            begin_s=begin_s,
            end_s=end_s,
            run=run,
            attempt=attempt,
            looks=1,
            counters=self._placed(1, {**sample.counters, **numbers}),
            lows=gauges,
            means=gauges,
            highs=gauges,
        )
        self._insert(0, frame)
        self.newest_s = end_s
        if end_s - self._aged_s >= _LOOKS_AT_AGES_EVERY_S:
            self._aged_s = end_s
            self._fold(end_s)
            self._forget(end_s)

    def document(self, content: Mapping[str, Any], *, run: int, attempt: int, at_s: float) -> None:
        """Store the document of an attempt, replacing the previous one."""
        data = zlib.compress(_json_in_pieces(content).encode(), 1)
        if len(data) > MOST_DOCUMENT_BYTES:
            return
        self._connection.execute("INSERT OR REPLACE INTO document VALUES (?, ?, ?, ?)", (run, attempt, at_s, data))
        self._connection.execute(
            "DELETE FROM document WHERE at_s < "
            "(SELECT min(at_s) FROM (SELECT at_s FROM document ORDER BY at_s DESC LIMIT ?))",
            (MOST_DOCUMENTS,),
        )

    def document_of(self, run: int, attempt: int) -> dict[str, Any] | None:
        """Return the stored document of an attempt."""
        found = self._connection.execute("SELECT data FROM document WHERE run = ? AND attempt = ?", (run, attempt))
        row = found.fetchone()
        try:
            content: object = json.loads(zlib.decompress(row[0])) if row is not None else None
        except (ValueError, zlib.error):
            return None
        return content if isinstance(content, dict) else None

    def findings(self, standing: Iterable[Finding], *, run: int, now_s: float, steps: int, judged: bool = True) -> None:
        """Store the active findings; each has slowed all of the `steps` made since the previous sample.

        Cost counts by steps, not by elapsed time: a finding stays active until the next window is judged, and that may
        be long, since no training happens during a hang or a restart.
        """
        known = {
            (rule, file, line, subject): (id_, active)
            for id_, rule, file, line, subject, active in self._connection.execute(
                "SELECT id, rule, file, line, subject, active FROM finding WHERE run = ?", (run,)
            )
        }
        seen: set[int] = set()
        for finding in standing:
            told = finding.as_json()
            data = bounded_json(told)
            lost_s = max(0.0, finding.seconds_per_step) * steps
            key = tuple(_storable(part) if isinstance(part, str) else part for part in finding.key)
            id_, active = known.get(key, (None, 0))  # type: ignore[arg-type]
            if id_ is None:
                cursor = self._connection.execute(
                    "INSERT INTO finding (run, rule, file, line, subject, first_seen_s, last_seen_s, active, "
                    "lost_seconds, data) VALUES (?, ?, ?, ?, ?, ?, ?, 1, ?, ?)",
                    (run, *key, now_s, now_s, lost_s, data),
                )
                id_ = int(cursor.lastrowid or 0)
            else:
                self._connection.execute(
                    "UPDATE finding SET last_seen_s = ?, active = 1, lost_seconds = lost_seconds + ?, data = ? "
                    "WHERE id = ?",
                    (now_s, lost_s, data, id_),
                )
            seen.add(id_)
            if not active:
                self.event(
                    "finding_came", {name: told[name] for name in ("rule", "file", "line", "subject")}, at_s=now_s
                )
        for key, (id_, active) in known.items():
            if judged and active and id_ not in seen:
                self._connection.execute("UPDATE finding SET active = 0 WHERE id = ?", (id_,))
                rule, file, line, subject = key
                gone = {"rule": rule, "file": file or None, "line": line or None, "subject": subject}
                self.event("finding_went", gone, at_s=now_s)
        self._connection.execute(
            "DELETE FROM finding WHERE id IN (SELECT id FROM finding ORDER BY last_seen_s DESC LIMIT -1 OFFSET ?)",
            (MOST_FINDINGS,),
        )

    def event(self, what: str, fields: Mapping[str, Any], *, at_s: float) -> None:
        """Add an event to the history; the oldest are deleted."""
        cursor = self._connection.execute(
            "INSERT INTO event (at_s, what, data) VALUES (?, ?, ?)", (at_s, _storable(what[:64]), bounded_json(fields))
        )
        oldest = int(cursor.lastrowid or 0) - self._limits.most_events
        self._connection.execute("DELETE FROM event WHERE id <= ?", (oldest,))

    def failure(self, number: int, first: Mapping[str, Any], *, at_s: float) -> None:
        """Store the first cause of an attempt, by the number of its directory."""
        self._connection.execute("INSERT OR REPLACE INTO failure VALUES (?, ?, ?)", (number, at_s, bounded_json(first)))
        self._connection.execute(
            "DELETE FROM failure WHERE number IN (SELECT number FROM failure ORDER BY number DESC LIMIT -1 OFFSET ?)",
            (MOST_FAILURES,),
        )

    def failures(self) -> set[int]:
        """Return the numbers of the attempts whose first cause is stored."""
        return {number for (number,) in self._connection.execute("SELECT number FROM failure")}

    def noted(self, name: str) -> Any:
        """Return the value noted under a name; None if there is none."""
        row = self._connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return row[0] if row is not None else None

    def note(self, name: str, value: float | str) -> None:
        """Note a value under a name."""
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    # -- slots

    def _placed(self, counts: int, values: Mapping[Key, float]) -> array[float]:
        """Return the values by slot; a new series gets the next free slot."""
        slots = self._slots[counts]
        for key in values.keys() - slots.keys():
            if len(slots) >= MOST_SERIES:
                break
            slots[key] = len(slots)
            self._connection.execute(
                "INSERT INTO series VALUES (?, ?, ?, ?)", (counts, slots[key], key[0], json.dumps(key[1:]))
            )
        placed = array("d", [math.nan]) * len(slots)
        for key, value in values.items():
            slot = slots.get(key)
            if slot is not None:
                placed[slot] = value
        return placed

    # -- downsampling and retention

    def _insert(self, level: int, frame: Frame) -> None:
        data = encode(frame)
        self._connection.execute(
            "INSERT INTO frame (level, begin_s, end_s, run, attempt, looks, num_counters, data) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(level, frame.begin_s, frame.end_s, frame.run, frame.attempt, frame.looks),
                *(len(frame.counters), data),
            ),
        )
        self._held_rows[level] += 1
        self._held_bytes[level] += len(data)

    def _fold(self, now_s: float) -> None:
        """Downsample: make the completed rows of every level from those of the level below."""
        for level, grain in enumerate(self._limits.levels):
            if not level:
                continue
            row = self._connection.execute("SELECT max(end_s) FROM frame WHERE level = ?", (level,)).fetchone()
            length_s = grain.length_s
            # A row ends somewhere in its interval: the next interval begins at the next multiple of the length.
            since_s = -math.inf if row[0] is None else (row[0] // length_s + 1) * length_s
            until_s = now_s // length_s * length_s
            if until_s <= since_s:
                continue
            rows = self._connection.execute(
                f"SELECT {_FRAME} FROM frame WHERE level = ? AND end_s >= ? AND end_s < ? ORDER BY end_s, id",  # noqa: S608
                (level - 1, since_s, until_s),
            ).fetchall()
            for _, together in groupby(rows, key=lambda row: (row[2] // length_s, row[3])):
                frames = list(_frames(together))
                if frames:
                    self._insert(level, fold(frames))

    def _forget(self, now_s: float) -> None:
        """Delete rows beyond the limits of age, number or bytes."""
        for level, grain in enumerate(self._limits.levels):
            most_bytes = grain.share * self._limits.file_bytes
            if grain.age_s is None:
                while self._held_rows[level] > grain.most_rows or self._held_bytes[level] > most_bytes:
                    if not self._join_neighbours(level):
                        break
                continue
            self._drop(level, "end_s < ?", (now_s - grain.age_s,))
            over = self._held_rows[level] - grain.most_rows
            if self._held_bytes[level] > most_bytes:
                mean_bytes = self._held_bytes[level] / self._held_rows[level]
                over = max(over, math.ceil((self._held_bytes[level] - most_bytes) / mean_bytes))
            if over > 0:
                oldest = "id IN (SELECT id FROM frame WHERE level = ? ORDER BY end_s LIMIT ?)"
                self._drop(level, oldest, (level, over))

    def _drop(self, level: int, which: str, values: tuple[float, ...]) -> None:
        rows, held = self._connection.execute(
            f"SELECT count(*), total(length(data)) FROM frame WHERE level = ? AND {which}",  # noqa: S608
            (level, *values),
        ).fetchone()
        if rows:
            self._connection.execute(f"DELETE FROM frame WHERE level = ? AND {which}", (level, *values))  # noqa: S608
            self._held_rows[level] -= rows
            self._held_bytes[level] -= round(held)

    def _join_neighbours(self, level: int) -> bool:
        """Merge the shortest pair of neighbouring rows; return False if no two are of one run."""
        row = self._connection.execute(
            "SELECT id, next_id FROM (SELECT id, run, begin_s, end_s, "
            "lead(id) OVER w AS next_id, lead(run) OVER w AS next_run, lead(end_s) OVER w AS next_end_s "
            "FROM frame WHERE level = ? WINDOW w AS (ORDER BY end_s, id)) "
            "WHERE next_run = run ORDER BY round((next_end_s - begin_s) / 60), end_s LIMIT 1",
            (level,),
        ).fetchone()
        if row is None:
            self._drop(level, "id IN (SELECT id FROM frame WHERE level = ? ORDER BY end_s LIMIT 1)", (level,))
            return self._held_rows[level] > 0
        rows = self._connection.execute(
            f"SELECT {_FRAME} FROM frame WHERE id IN (?, ?) ORDER BY end_s, id",  # noqa: S608
            row,
        ).fetchall()
        frames = list(_frames(rows))
        self._drop(level, "id IN (?, ?)", row)
        if frames:
            self._insert(level, fold(frames))
        return True

    def _check_ahead(self) -> None:
        """Truncate the write-ahead log near its limit; raise if a long-lived reader prevents it."""
        ahead = f"{self.path}-wal"
        with contextlib.suppress(FileNotFoundError):
            if os.stat(ahead).st_size <= self._limits.ahead_bytes - self._limits.ahead_bytes // 8:
                return
            busy = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            if busy:
                raise HeldByReaderError("a reader keeps it from being written down")


def _frames(rows: Iterable[tuple[Any, ...]]) -> Iterator[Frame]:
    """Yield the frames of rows; damaged ones are skipped."""
    for _, begin_s, end_s, run, attempt, looks, num_counters, data in rows:
        with contextlib.suppress(ValueError):
            yield decode(
                data, num_counters=num_counters, begin_s=begin_s, end_s=end_s, run=run, attempt=attempt, looks=looks
            )


def _json_in_pieces(content: Mapping[str, Any]) -> str:
    """Return an object as JSON, encoded in pieces: one call for a node with many ranks would hold the GIL, and block
    the sidecar's loop, for a tenth of a second."""
    parts: list[str] = []
    for name, value in content.items():
        if isinstance(value, dict):
            inside = ",".join(f"{json.dumps(str(key))}:{json.dumps(each)}" for key, each in value.items())
            text = f"{{{inside}}}"
        elif isinstance(value, list):
            text = f"[{','.join(map(json.dumps, value))}]"
        else:
            text = json.dumps(value)
        parts.append(f"{json.dumps(name)}:{text}")
    return f"{{{','.join(parts)}}}"


def _storable(text: str) -> str:
    """Return text that SQLite accepts: file names may have undecodable bytes (lone surrogates)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
