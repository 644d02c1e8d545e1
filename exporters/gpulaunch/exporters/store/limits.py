"""Retention and resolution of the stored telemetry: constants.

    level 0     every sample (once a second)    for 10 minutes
    level 1     10 s                            for 2 hours
    level 2     60 s                            for 2 days
    level 3     10 min                          for ever: 4032 rows are four weeks; then neighbours are merged, the
                                                shortest pair first, oldest first, so that a run of any
                                                length has between 2016 and 4032 rows of nearly equal length

Each level also has a share of the bytes: a node with very many ranks keeps its fine levels for a shorter time.

The file is never larger than `file_bytes` (enforced by SQLite), its write-ahead log (`-wal`) never larger than
`ahead_bytes`; one file that was found damaged may be kept beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_MIB: Final = 1 << 20
MOST_SERIES: Final = 40_000
MOST_EVENTS: Final = 4000
MOST_FAILURES: Final = 200
MOST_FINDINGS: Final = 400
MOST_DOCUMENTS: Final = 6
MOST_TEXT_BYTES: Final = 4096
"""Per event, failure or finding as JSON."""
MOST_DOCUMENT_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Level:
    """One resolution level."""

    length_s: float
    """Length of its rows; 0: the time between two samples."""
    age_s: float | None
    """Retention of the rows; None: unlimited."""
    share: float
    """Share of the file's bytes."""
    most_rows: int


LEVELS: Final = (
    Level(length_s=0.0, age_s=600.0, share=0.10, most_rows=700),
    Level(length_s=10.0, age_s=7200.0, share=0.12, most_rows=740),
    Level(length_s=60.0, age_s=172_800.0, share=0.22, most_rows=2900),
    Level(length_s=600.0, age_s=None, share=0.22, most_rows=4032),
)
"""The shares sum to two thirds; the rest is for partly filled pages, events, findings and documents."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a file: its size, and how long a write may wait."""

    file_bytes: int = 96 * _MIB
    ahead_bytes: int = 32 * _MIB
    levels: tuple[Level, ...] = field(default=LEVELS)
    most_events: int = MOST_EVENTS
    lock_wait_s: float = 1.0
    """The longest wait for a lock of another process; afterwards the write fails."""
