"""Reads telemetry.sqlite, also while it is written: rows at the right resolution, findings, events, documents."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, cast
from urllib.parse import quote

from gpulaunch.exporters.store.bounded import LARGEST, sound
from gpulaunch.exporters.store.frame import Frame, decode
from gpulaunch.exporters.store.limits import LEVELS, MOST_DOCUMENT_BYTES, MOST_DOCUMENTS
from gpulaunch.exporters.store.schema import APPLICATION, SCHEMA, has_our_tables, reason_of
from gpulaunch.exporters.store.series import NUMBERS, Key

_BUSY_S: Final = 2.0
_LARGEST_VALUE_BYTES: Final = 8 * MOST_DOCUMENT_BYTES
_LARGEST_DOCUMENT_BYTES: Final = 32 * MOST_DOCUMENT_BYTES


class UnreadableError(Exception):
    """The file cannot be read; the message is one line, with its name."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A launcher run that used the directory."""

    id: int
    run_id: str
    name: str
    node: int
    world_size: int
    host: str
    began_s: float


@dataclass(frozen=True, kw_only=True)
class FindingRow:
    """A finding of one run: when it was seen and what it has cost."""

    run: int
    """`RunRow.id`."""
    told: dict[str, Any]
    """`record.Finding.as_json`; parts of it where it was too long."""
    first_seen_s: float
    last_seen_s: float
    active: bool
    lost_seconds: float


@dataclass(frozen=True, kw_only=True)
class StoredFacts:
    """The facts of an attempt that are not time series (`attempt_facts.py`)."""

    run: int
    attempt: int
    at_s: float
    content: dict[str, Any]


class TelemetryReader:
    """A snapshot of the file at the moment of opening: later writes are not seen."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            UnreadableError: it cannot be read, is damaged, has a newer schema, or is another program's.
        """
        self.path = path
        self.notes: list[str] = []
        """What could not be read; one line each."""
        with self._told():
            self._connection = self._open()
        try:
            with self._told():
                self._check()
                self._connection.execute("BEGIN")
                self.keys: tuple[list[Key], list[Key]] = ([], [])
                """The series by slot: of the gauges, of the counters."""
                for counts, slot, name, labels in self._connection.execute("SELECT * FROM series ORDER BY slot"):
                    keys = self.keys[counts]
                    keys += [("",)] * (_slot(slot) - len(keys))  # none is ever missing, but a file may be damaged
                    keys.append((name, *map(str, json.loads(labels))))
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> TelemetryReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Do so soon: the write-ahead log grows while it is open."""
        self._connection.close()

    def runs(self) -> list[RunRow]:
        """Return the launcher runs, oldest first."""
        with self._told():
            rows = self._connection.execute(
                "SELECT id, run_id, name, node, world_size, host, began_s FROM run ORDER BY id"
            ).fetchall()
        return [
            RunRow(id=row[0], run_id=row[1], name=row[2], node=row[3], world_size=row[4], host=row[5], began_s=row[6])
            for row in self._sound(rows, int, str, str, int, int, str, float)
        ]

    def span(self) -> tuple[float, float] | None:
        """Return the beginning of the oldest row and the end of the newest; None if there are no rows."""
        with self._told():
            row = self._connection.execute("SELECT min(begin_s), max(end_s) FROM frame").fetchone()
        return (float(row[0]), float(row[1])) if list(self._sound([row], float, float)) else None

    def frames(
        self, *, since_s: float = -math.inf, until_s: float = math.inf, step_s: float = 0.0, most: int | None = None
    ) -> Iterator[Frame]:
        """Yield the rows of a time range, oldest first, none twice: each moment from the finest level that fits.

        Args:
            since_s: exclude rows that end before or at this time.
            until_s: exclude rows that end after this time.
            step_s: rows about as long as this are fine enough; 0: the finest available.
            most: at most this many rows of each level, evenly spread.
        """
        with self._told():
            for level, low, high in self._pieces(since_s, until_s, step_s):
                yield from self._level(level, low, high, most)

    def newest(self, count: int) -> list[Frame]:
        """Return the newest samples, oldest first."""
        with self._told():
            rows = self._connection.execute(
                f"SELECT {_FRAME} FROM frame WHERE level = 0 ORDER BY end_s DESC LIMIT ?",  # noqa: S608
                (count,),
            ).fetchall()
        return list(self._frames(reversed(rows)))

    def values(self, frame: Frame) -> tuple[dict[Key, float], dict[Key, float]]:
        """Return a frame's counters and gauge means by key, without unknown values (NaN)."""
        gauges, counters = self.keys
        means = {key: value for key, value in zip(gauges, frame.means, strict=False) if abs(value) <= LARGEST}
        newest = {key: value for key, value in zip(counters, frame.counters, strict=False) if abs(value) <= LARGEST}
        for key in [key for key in newest if key[0] in NUMBERS]:
            means[key] = newest.pop(key)
        return newest, means

    def findings(self) -> list[FindingRow]:
        """Return all findings, oldest first."""
        with self._told():
            rows = self._connection.execute(
                "SELECT run, data, rule, file, line, subject, first_seen_s, last_seen_s, active, lost_seconds "
                "FROM finding ORDER BY first_seen_s, id"
            ).fetchall()
        found: list[FindingRow] = []
        for run, data, rule, file, line, subject, first_seen_s, last_seen_s, active, lost_seconds in self._sound(
            rows, int, str, str, str, int, str, float, float, int, float
        ):
            told = {"rule": rule, "file": file or None, "line": line or None, "subject": subject, **self._object(data)}
            found.append(
                FindingRow(
                    run=run,
                    told=told,
                    first_seen_s=first_seen_s,
                    last_seen_s=last_seen_s,
                    active=bool(active),
                    lost_seconds=lost_seconds,
                )
            )
        return found

    def events(self) -> list[tuple[float, str, dict[str, Any]]]:
        """Return time, name and fields of every event, oldest first."""
        with self._told():
            rows = self._connection.execute("SELECT at_s, what, data FROM event ORDER BY id").fetchall()
        return [(at_s, what, self._object(data)) for at_s, what, data in self._sound(rows, float, str, str)]

    def failures(self) -> dict[int, dict[str, Any]]:
        """Return the stored first cause of each failed attempt, by the number of its directory."""
        return {number: first for number, _, first in self.failed()}

    def failed(self) -> list[tuple[int, float, dict[str, Any]]]:
        """Return the same with the time when each report was written."""
        with self._told():
            rows = self._connection.execute("SELECT number, at_s, data FROM failure ORDER BY number").fetchall()
        return [(number, at_s, self._object(data)) for number, at_s, data in self._sound(rows, int, float, str)]

    def documents(self) -> list[StoredFacts]:
        """Return the facts of the attempts, the one seen last at the end."""
        with self._told():
            rows = self._connection.execute(
                "SELECT run, attempt, at_s, data FROM document ORDER BY at_s DESC LIMIT ?", (MOST_DOCUMENTS,)
            ).fetchall()[::-1]
        found: list[StoredFacts] = []
        for run, attempt, at_s, data in self._sound(rows, int, int, float, bytes):
            try:
                text = zlib.decompressobj().decompress(data, _LARGEST_DOCUMENT_BYTES)
                content: object = sound(json.loads(text))
            except (ValueError, zlib.error, RecursionError, TypeError):
                content = None
            if isinstance(content, dict):
                found.append(StoredFacts(run=run, attempt=attempt, at_s=at_s, content=cast("dict[str, Any]", content)))
            else:
                self.notes.append(f"{self.path.name}: what was kept of attempt {attempt} is damaged")
        return found

    def noted(self, name: str) -> Any:
        """Return the value noted under a name; None if there is none."""
        with self._told():
            row = self._connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    # -- inside

    def _open(self) -> sqlite3.Connection:
        name = quote(os.fsencode(os.path.abspath(self.path)))
        if not self.path.is_file():
            raise UnreadableError(f"there is no {self.path.name}")
        # A file without a writer, in a read-only directory: its write-ahead log cannot be opened.
        for how in ("mode=ro", "mode=ro&immutable=1"):
            connection = sqlite3.connect(f"file:{name}?{how}", uri=True, timeout=_BUSY_S, isolation_level=None)
            try:
                connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
            except sqlite3.OperationalError as error:
                connection.close()
                code = (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
                if "immutable" in how or code not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                    raise
                self.notes.append(f"{self.path.name}: its directory is read-only: the newest seconds may be missing")
                continue
            except BaseException:
                connection.close()
                raise
            return connection
        raise AssertionError("the last way opens or raises")

    def _check(self) -> None:
        self._connection.execute("PRAGMA trusted_schema=OFF")
        self._connection.execute("PRAGMA query_only=ON")
        (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION:
            made = self._connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
            raise UnreadableError(f"{self.path.name} is {'not of gpulaunch' if made else 'empty'}")
        if version != SCHEMA:
            raise UnreadableError(
                f"{self.path.name} is of a newer gpulaunch (schema {version}, this one knows {SCHEMA}); "
                "read it with that one"
            )
        if not has_our_tables(self._connection):
            raise UnreadableError(f"{self.path.name} is damaged: it has other tables than gpulaunch's")
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST_VALUE_BYTES)

    @contextlib.contextmanager
    def _told(self) -> Generator[None]:
        """Convert every error of a broken file into a one-line UnreadableError."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
            damaged = code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
            why = f"is damaged ({error})" if damaged else f"cannot be read: {reason_of(error)}"
            raise UnreadableError(f"{self.path.name} {why}") from None
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise UnreadableError(f"{self.path.name} cannot be read: {reason_of(error)}") from None

    def _pieces(self, since_s: float, until_s: float, step_s: float) -> Sequence[tuple[int, float, float]]:
        """Return which level covers which time range, oldest first.

        The coarsest level that is fine enough covers most of it; finer ones cover what is too new to be downsampled
        yet, coarser ones what is past the retention of that level.
        """
        spans: dict[int, tuple[float, float]] = {
            level: (oldest_s, newest_s)
            for level, oldest_s, newest_s in self._connection.execute(
                "SELECT level, min(begin_s), max(end_s) FROM frame WHERE end_s > ? AND end_s <= ? GROUP BY level",
                (since_s, until_s),
            )
        }
        damaged = f"{self.path.name}: rows of no known level are left out"
        if spans.keys() - set(_LEVELS) and damaged not in self.notes:
            self.notes.append(damaged)
        spans = {level: spans[level] for level in _LEVELS if level in spans}
        if not spans:
            return []
        if not all(_is(moment, float) for span in spans.values() for moment in span):
            raise ValueError("moments are no numbers")
        fitting = max((level for level in spans if _LENGTHS_S[level] <= max(step_s, 1.0)), default=min(spans))
        pieces = [(fitting, since_s, until_s)]
        oldest_s, newest_s = spans[fitting]
        for level in range(fitting - 1, -1, -1):
            if level in spans and spans[level][1] > newest_s:
                pieces.append((level, newest_s, until_s))
                newest_s = spans[level][1]
        for level in range(fitting + 1, len(_LENGTHS_S)):
            if level in spans and spans[level][0] < oldest_s:
                # A coarse row overlaps what the finer level still has: use the finer level only after it.
                (seam_s,) = self._connection.execute(
                    "SELECT max(end_s) FROM frame WHERE level = ? AND begin_s < ? AND end_s > ? AND end_s <= ?",
                    (level, oldest_s, since_s, until_s),
                ).fetchone()
                pieces[0] = (pieces[0][0], seam_s, pieces[0][2])
                pieces.insert(0, (level, since_s, seam_s))
                oldest_s = spans[level][0]
        return pieces

    def _level(self, level: int, low: float, high: float, most: int | None) -> Iterator[Frame]:
        where = "level = ? AND end_s > ? AND end_s <= ?"
        values = (level, low, high)
        every = 1
        if most is not None:
            (count,) = self._connection.execute(f"SELECT count(*) FROM frame WHERE {where}", values).fetchone()  # noqa: S608
            every = max(1, math.ceil(count / most))
        if every == 1:
            rows = self._connection.execute(
                f"SELECT {_FRAME} FROM frame WHERE {where} ORDER BY end_s, id",  # noqa: S608
                values,
            )
        else:
            rows = self._connection.execute(
                f"SELECT {_FRAME} FROM frame WHERE id IN (SELECT id FROM (SELECT id, row_number() OVER "  # noqa: S608
                f"(ORDER BY end_s DESC, id DESC) AS place FROM frame WHERE {where}) WHERE place % ? = 1) "
                "ORDER BY end_s, id",
                (*values, every),
            )
        yield from self._frames(rows)

    def _frames(self, rows: Any) -> Iterator[Frame]:
        damaged = 0
        for begin_s, end_s, run, attempt, looks, num_counters, data in rows:
            try:
                if not (_is(begin_s, float) and _is(end_s, float) and _is(looks, int) and _is(run, int) and looks > 0):
                    raise TypeError("not numbers")  # noqa: TRY301
                yield decode(
                    data, num_counters=num_counters, begin_s=begin_s, end_s=end_s, run=run, attempt=attempt, looks=looks
                )
            except (ValueError, TypeError):
                damaged += 1
        if damaged:
            self.notes.append(f"{self.path.name}: {damaged} rows are damaged and left out")

    def _sound(self, rows: Any, *types: type) -> Iterator[tuple[Any, ...]]:
        """Skip rows whose columns have the wrong type: SQLite stores any type in any column."""
        damaged = 0
        for row in rows:
            if all(_is(value, of) for value, of in zip(row, types, strict=True)):
                yield row
            else:
                damaged += row != (None,) * len(row)
        if damaged:
            self.notes.append(f"{self.path.name}: {damaged} rows are damaged and left out")

    def _object(self, text: object) -> dict[str, Any]:
        try:
            value: object = sound(json.loads(text)) if isinstance(text, str) else None
        except (ValueError, RecursionError):
            value = None
        return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _slot(number: int) -> int:
    if not 0 <= number < _MOST_SLOTS:
        raise ValueError("its series are numbered wrongly")
    return number


def _is(value: object, of: type) -> bool:
    """Whether a column has the expected type; numbers must be within limits."""
    if of is float:
        return isinstance(value, (int, float)) and abs(value) < _LARGEST
    return isinstance(value, of) and (of is not int or abs(value) < _LARGEST)  # type: ignore[arg-type]


_LARGEST: Final = 1e15
_FRAME: Final = "begin_s, end_s, run, attempt, looks, num_counters, data"
_MOST_SLOTS: Final = 1 << 20
_LENGTHS_S: Final = tuple(max(1.0, level.length_s) for level in LEVELS)
_LEVELS: Final = range(len(_LENGTHS_S))
