"""Quantities as people read them. What is not known is a dash."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Final

__all__ = ["UNKNOWN", "amount", "count", "moment", "percent", "rank_list", "seconds", "signed_percent", "size"]

UNKNOWN: Final = "-"
_BYTES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def seconds(value: float | None) -> str:
    """A length of time: `0.35 ms`, `12.3 ms`, `4.56 s`, `3 min 05 s`, `2 h 07 min`."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    length = abs(value)
    sign = "-" if value < 0 else ""
    if length < 1:
        return f"{sign}{1000 * length:.3g} ms" if length else "0 s"
    if length < 59.95:
        return f"{sign}{length:.3g} s"
    if length < 3599.5:
        minutes, rest = divmod(round(length), 60)
        return f"{sign}{minutes} min {rest:02} s"
    hours, minutes = divmod(round(length / 60), 60)
    return f"{sign}{hours} h {minutes:02} min"


def size(value: float | None) -> str:
    """A number of bytes."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    power = 0
    while abs(value) >= 1023.5 and power < len(_BYTES) - 1:
        value /= 1024
        power += 1
    return (
        f"{value:.0f} B"
        if power == 0
        else f"{value:.3g} {_BYTES[power]}"
        if abs(value) < 999.5
        else (f"{value:.0f} {_BYTES[power]}")
    )


def percent(ratio: float | None) -> str:
    """A share."""
    if ratio is None or not math.isfinite(ratio):
        return UNKNOWN
    return f"{100 * ratio:.1f} %"


def signed_percent(ratio: float | None) -> str:
    """A change."""
    if ratio is None or not math.isfinite(ratio):
        return UNKNOWN
    return f"{100 * ratio:+.1f} %"


def count(value: float | None) -> str:
    """How many."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{round(value):,}"


def amount(value: float | None) -> str:
    """Any other number."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def moment(at_s: float | None) -> str:
    """A Unix time, as UTC: the page is read elsewhere than where the run was."""
    if at_s is None:
        return UNKNOWN
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return UNKNOWN


def rank_list(ranks: tuple[int, ...], most: int = 8) -> str:
    """`0, 1, 2`; of many, the first."""
    return ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
