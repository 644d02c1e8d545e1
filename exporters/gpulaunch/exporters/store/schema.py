"""The schema of telemetry.sqlite; opens it for writing: created, continued, set aside, or refused.

    run        every launcher run that used the directory; counters restart with each
    series     the series of each slot of a frame (`frame.py`); only ever grows
    frame      the numbers, by level (`limits.py`)
    document   facts of an attempt that are not time series, as of its last sample
    finding    a row per finding, with when it was seen and what it has cost
    event      the run's history: events.jsonl, and findings as they come and go
    failure    the first cause of each failed attempt
    meta       how far events.jsonl was read, and what happened to the file

`PRAGMA user_version` is the schema version. A file with a newer one is not touched.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from pathlib import Path
from typing import Final

from gpulaunch.exporters.store.limits import Limits
from gpulaunch.exporters.store.locations import is_shared

SCHEMA: Final = 1
APPLICATION: Final = 0x67706C74
"""`gplt` (PRAGMA application_id): identifies the file, also to the tool `file`."""
_PAGE_BYTES: Final = 4096

_TABLES: Final = """
CREATE TABLE run (
    id INTEGER PRIMARY KEY, run_id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, node INTEGER NOT NULL,
    world_size INTEGER NOT NULL, host TEXT NOT NULL, began_s REAL NOT NULL);
CREATE TABLE series (
    counts INTEGER NOT NULL, slot INTEGER NOT NULL, name TEXT NOT NULL, labels TEXT NOT NULL,
    PRIMARY KEY (counts, slot)) WITHOUT ROWID;
CREATE TABLE frame (
    id INTEGER PRIMARY KEY, level INTEGER NOT NULL, begin_s REAL NOT NULL, end_s REAL NOT NULL, run INTEGER NOT NULL,
    attempt INTEGER, looks INTEGER NOT NULL, num_counters INTEGER NOT NULL, data BLOB NOT NULL);
CREATE INDEX frame_when ON frame (level, end_s);
CREATE TABLE document (
    run INTEGER NOT NULL, attempt INTEGER NOT NULL, at_s REAL NOT NULL, data BLOB NOT NULL, PRIMARY KEY (run, attempt));
CREATE TABLE finding (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL, rule TEXT NOT NULL, file TEXT NOT NULL, line INTEGER NOT NULL,
    subject TEXT NOT NULL, first_seen_s REAL NOT NULL, last_seen_s REAL NOT NULL, active INTEGER NOT NULL,
    lost_seconds REAL NOT NULL, data TEXT NOT NULL, UNIQUE (run, rule, file, line, subject));
CREATE TABLE event (id INTEGER PRIMARY KEY, at_s REAL NOT NULL, what TEXT NOT NULL, data TEXT NOT NULL);
CREATE TABLE failure (number INTEGER PRIMARY KEY, at_s REAL NOT NULL, data TEXT NOT NULL);
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""


_OURS: Final = frozenset(statement.strip() for statement in _TABLES.split(";") if statement.strip())
"""Exactly as SQLite stores them."""


class RefusedError(Exception):
    """The file must not be written; the message is one line."""


class DamagedError(Exception):
    """The file is damaged; the message is one line."""


def open_to_write(path: Path, limits: Limits) -> sqlite3.Connection:
    """Open the file, or create it.

    Raises:
        RefusedError: it has a newer schema, is not a regular file, or is another program's.
        DamagedError: it has to be set aside.
        OSError, sqlite3.Error: it cannot be opened now.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)  # owner only; files that SQLite creates beside it get the same mode
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if not stat.S_ISREG(status.st_mode):
        raise RefusedError(f"{path.name} is no file")
    # Autocommit: transactions are explicit. Another thread than the working one may close the connection.
    connection = sqlite3.connect(
        os.fsencode(path), timeout=limits.lock_wait_s, isolation_level=None, check_same_thread=False
    )
    try:
        return _prepared(connection, path, limits, fresh=status.st_size == 0)
    except sqlite3.DatabaseError as error:
        connection.close()
        if _is_damage(error):
            raise DamagedError(f"{path.name} is damaged ({error})") from None
        raise
    except BaseException:
        connection.close()
        raise


def _prepared(connection: sqlite3.Connection, path: Path, limits: Limits, *, fresh: bool) -> sqlite3.Connection:
    def ask(pragma: str) -> int:
        return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])

    if fresh:
        connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")
    version, application, tables = ask("user_version"), ask("application_id"), _tables(connection)
    if application != APPLICATION and tables:
        raise RefusedError(f"{path.name} is not gpulaunch's: move it away")
    if version > SCHEMA:
        raise RefusedError(
            f"{path.name} is of a newer gpulaunch (schema {version}, this one knows {SCHEMA}): left alone"
        )
    if tables and not has_our_tables(connection):
        raise DamagedError(f"{path.name} has other tables than gpulaunch's")
    if not fresh and connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
        raise DamagedError(f"{path.name} is damaged")
    # "truncate": see locations.py. Committed data survives the death of this process either way; with a
    # write-ahead log the last seconds before a power cut may be lost, but the file stays intact.
    mode = "TRUNCATE" if is_shared(path) else "WAL"
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA wal_autocheckpoint=500")
    connection.execute(f"PRAGMA journal_size_limit={4 << 20}")
    connection.execute("PRAGMA cache_size=-1024")
    connection.execute("PRAGMA temp_store=MEMORY")
    connection.execute(f"PRAGMA max_page_count={limits.file_bytes // ask('page_size')}")
    if not tables:
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={APPLICATION}")
            connection.execute(f"PRAGMA user_version={SCHEMA}")
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
    return connection


def set_aside(path: Path) -> Path:
    """Rename a damaged file, replacing an earlier one, and remove its journal files. Raises OSError."""
    aside = path.with_name(path.name + ".damaged")
    path.replace(aside)
    for suffix in ("-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")
    return aside


def reason_of(error: Exception) -> str:
    """Return a short reason why the file could not be written."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        code = code & 0xFF if isinstance(code, int) else None
        return _REASONS.get(code, str(error)) if code is not None else str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def damages(error: Exception) -> bool:
    """Whether an error means that the file is damaged."""
    return isinstance(error, DamagedError) or (isinstance(error, sqlite3.DatabaseError) and _is_damage(error))


_REASONS: Final = {
    sqlite3.SQLITE_FULL: "no room: the disk is full",
    sqlite3.SQLITE_BUSY: "locked by another process",
    sqlite3.SQLITE_LOCKED: "locked by another process",
    sqlite3.SQLITE_READONLY: "read-only",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened",
    sqlite3.SQLITE_PERM: "permission denied",
    sqlite3.SQLITE_IOERR: "the disk reports an error",
}


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None


def has_our_tables(connection: sqlite3.Connection) -> bool:
    """Whether there are exactly the tables of this version: a foreign view or trigger would be executed."""
    made = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT ?", (2 * len(_OURS),))
    return frozenset(sql for (sql,) in made) == _OURS
