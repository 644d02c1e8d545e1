"""Writing telemetry.sqlite: what a look brought, folded as it gets older, kept within its bounds.

Coarse rows are made of the finer ones in the file, not of what the process remembers: a sidecar that is killed loses
nothing but its last look, and the next one goes on as if it had been there.
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
"""On a network file system: without a write-ahead log every look waits for the server, twice."""
_FRAME: Final = "id, begin_s, end_s, run, attempt, looks, num_counters, data"


class HeldByReaderError(Exception):
    """A reader keeps what was written ahead from being put into the file, and that is as large as it may be."""


class TelemetryFile:
    """The file of one node, open to write. Whatever it raises, close it and open it anew: nothing half is in it."""

    def __init__(self, path: Path, limits: Limits | None = None) -> None:
        """Open it. Raises what `schema.open_to_write` raises."""
        self.path = path
        self._limits = limits or Limits()
        self._connection = open_to_write(path, self._limits)
        self.apart_s = _APART_SHARED_S if is_shared(path) else _APART_S
        """How far apart looks should be at least: each is made to last."""
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
        """Put all of it into the one file, and let it go. Raises nothing."""
        with contextlib.suppress(sqlite3.Error):
            # A file that nobody writes needs nothing beside it: it can be copied, and read where nothing may be
            # written. While somebody reads, it stays as it is, and the next to open it finds it whole all the same.
            self._connection.execute("PRAGMA busy_timeout=100")
            self._connection.execute("PRAGMA journal_mode=DELETE")
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    @contextlib.contextmanager
    def writing(self) -> Generator[None]:
        """All that is written in it, or nothing.

        Raises:
            HeldByReaderError: not now.
            sqlite3.Error: not at all.
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
        """Give the row of a launcher run."""
        known = self._runs.get(group.run_id)
        if known is None:
            self._connection.execute(
                "INSERT OR IGNORE INTO run (run_id, name, node, world_size, host, began_s) VALUES (?, ?, ?, ?, ?, ?)",
                (group.run_id, group.name, group.node_rank, group.world_size, host, now_s),
            )
            found = self._connection.execute("SELECT id FROM run WHERE run_id = ?", (group.run_id,))
            known = self._runs[group.run_id] = int(found.fetchone()[0])
        return known

    def look(self, sample: Sample, *, run: int, attempt: int | None, begin_s: float, end_s: float) -> None:
        """Add what was seen at `end_s`; everything that is old enough is folded and forgotten."""
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
        """Keep what is known of an attempt, in place of what was."""
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
        """Give what is kept of an attempt."""
        found = self._connection.execute("SELECT data FROM document WHERE run = ? AND attempt = ?", (run, attempt))
        row = found.fetchone()
        try:
            content: object = json.loads(zlib.decompress(row[0])) if row is not None else None
        except (ValueError, zlib.error):
            return None
        return content if isinstance(content, dict) else None

    def findings(self, standing: Iterable[Finding], *, run: int, now_s: float, steps: int, judged: bool = True) -> None:
        """Take what stands now; it has made each of the `steps` longer that were made since the look before.

        Not all of the time in between: a finding stands until the next window is judged, and that may be long, for
        nobody trains during a hang or a restart.
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
        """Add a line to the history; the oldest go."""
        cursor = self._connection.execute(
            "INSERT INTO event (at_s, what, data) VALUES (?, ?, ?)", (at_s, _storable(what[:64]), bounded_json(fields))
        )
        oldest = int(cursor.lastrowid or 0) - self._limits.most_events
        self._connection.execute("DELETE FROM event WHERE id <= ?", (oldest,))

    def failure(self, number: int, first: Mapping[str, Any], *, at_s: float) -> None:
        """Keep the first cause of an attempt, by the number of its directory."""
        self._connection.execute("INSERT OR REPLACE INTO failure VALUES (?, ?, ?)", (number, at_s, bounded_json(first)))
        self._connection.execute(
            "DELETE FROM failure WHERE number IN (SELECT number FROM failure ORDER BY number DESC LIMIT -1 OFFSET ?)",
            (MOST_FAILURES,),
        )

    def failures(self) -> set[int]:
        """Give the numbers of the attempts whose first cause is kept."""
        return {number for (number,) in self._connection.execute("SELECT number FROM failure")}

    def noted(self, name: str) -> Any:
        """Give what was noted under a name; None for nothing."""
        row = self._connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return row[0] if row is not None else None

    def note(self, name: str, value: float | str) -> None:
        """Note a value under a name."""
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    # -- slots

    def _placed(self, counts: int, values: Mapping[Key, float]) -> array[float]:
        """Give the values in their slots; a series that is new gets the next one."""
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

    # -- growing older

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
        """Make the rows of every level whose time is over of those of the level below."""
        for level, grain in enumerate(self._limits.levels):
            if not level:
                continue
            row = self._connection.execute("SELECT max(end_s) FROM frame WHERE level = ?", (level,)).fetchone()
            length_s = grain.length_s
            # A row ends somewhere in its stretch of time: the next stretch begins at the next multiple of the length.
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
        """Let go of rows that are too old, too many, or too much."""
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
        """Make one row of the two neighbours that are shortest together; False where there are no two of one run."""
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
        """A reader that does not end keeps the write-ahead log growing: past its bound nothing is written."""
        ahead = f"{self.path}-wal"
        with contextlib.suppress(FileNotFoundError):
            if os.stat(ahead).st_size <= self._limits.ahead_bytes - self._limits.ahead_bytes // 8:
                return
            busy = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            if busy:
                raise HeldByReaderError("a reader keeps it from being written down")


def _frames(rows: Iterable[tuple[Any, ...]]) -> Iterator[Frame]:
    """What rows are; one that is damaged is left out."""
    for _, begin_s, end_s, run, attempt, looks, num_counters, data in rows:
        with contextlib.suppress(ValueError):
            yield decode(
                data, num_counters=num_counters, begin_s=begin_s, end_s=end_s, run=run, attempt=attempt, looks=looks
            )


def _json_in_pieces(content: Mapping[str, Any]) -> str:
    """An object as JSON, made piece by piece: one call for a node of many ranks would hold the interpreter, and with
    it the sidecar's loop, for a tenth of a second."""
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
    """Text that SQLite takes: names of files may hold bytes that are no text (lone surrogates)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
