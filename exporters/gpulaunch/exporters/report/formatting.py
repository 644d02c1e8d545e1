"""Formats quantities, timestamps and ranks for a report. An unknown value is a dash."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from gpulaunch.exporters.view.figures import PROSE, UNKNOWN, known

seconds, size, percent, amount = PROSE.seconds, PROSE.size, PROSE.ratio, PROSE.number


def words(name: str) -> str:
    """Format a name of ours: `data wait`."""
    return name.replace("_", " ")


def measured(figures: Mapping[str, float | str]) -> list[tuple[str, str]]:
    """Format the evidence of a finding: names as text, values in the units of their names."""
    return [
        (words(name), value) if isinstance(value, str) else PROSE.measured(name, value)
        for name, value in figures.items()
    ]


def signed_percent(ratio: float | None) -> str:
    """Format a relative change."""
    return f"{100 * ratio:+.1f} %" if known(ratio) else UNKNOWN


def moment(at_s: float | None) -> str:
    """Format a Unix time as UTC: the page may be read in another time zone than the run's."""
    if at_s is None:
        return UNKNOWN
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return UNKNOWN


def rank_list(ranks: tuple[int, ...], most: int = 8) -> str:
    """Format as `0, 1, 2`; of many, the first."""
    return ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
