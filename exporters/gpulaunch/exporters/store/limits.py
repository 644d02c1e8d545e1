"""How much of a run is kept, how finely, and for how long. Pure numbers.

    level 0     every look (once a second)      for 10 minutes
    level 1     10 s                            for 2 hours
    level 2     60 s                            for 2 days
    level 3     10 min                          for ever: 4032 rows are four weeks; then neighbours are made one, those
                                                first that are shortest together, oldest first, so that a run of any
                                                length has between 2016 and 4032 rows of nearly equal length

Each level has its share of the bytes, too: a node of very many ranks keeps its fine levels for a shorter time.

The file is never larger than `file_bytes` (SQLite itself refuses to grow it further), what SQLite writes ahead of it
(`-wal`) never larger than `ahead_bytes`; and one file that was found damaged may lie beside it.
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
"""Of an event, a failure or a finding as JSON."""
MOST_DOCUMENT_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Level:
    """One grain of time."""

    length_s: float
    """How long its rows are; 0: as long as the time between two looks."""
    age_s: float | None
    """How old they get; None: any age."""
    share: float
    """Of the file's bytes."""
    most_rows: int


LEVELS: Final = (
    Level(length_s=0.0, age_s=600.0, share=0.10, most_rows=700),
    Level(length_s=10.0, age_s=7200.0, share=0.12, most_rows=740),
    Level(length_s=60.0, age_s=172_800.0, share=0.22, most_rows=2900),
    Level(length_s=600.0, age_s=None, share=0.22, most_rows=4032),
)
"""Two thirds of the bytes; the rest is room for pages that are not full, events, findings and documents."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a file may come to."""

    file_bytes: int = 96 * _MIB
    ahead_bytes: int = 32 * _MIB
    levels: tuple[Level, ...] = field(default=LEVELS)
    most_events: int = MOST_EVENTS
