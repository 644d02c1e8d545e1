"""Formats quantities for people, in two styles; an unknown value is a dash in both.

Sentences and tables (`PROSE`) have full units and only significant digits: `12.3 ms`, `1.5 GiB`, `1,240`, `40.4 %`.
Terminal cells (`CELLS`) are compact, and a number that refreshes every second keeps its width: `12.3ms`, `1.50G`,
`1.24k`, `40%`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeGuard

UNKNOWN: Final = "-"
_PARTS_OF_A_SECOND: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_MULTIPLES_OF_A_HERTZ: Final = ((1e9, "GHz"), (1e6, "MHz"), (1e3, "kHz"), (1.0, "Hz"))
_JUST: Final = 0.9995
"""From this value on, three digits round up to the next unit."""


def known(value: float | None) -> TypeGuard[float]:
    """Whether there is a number to format."""
    return value is not None and math.isfinite(value)


def count(value: float | None) -> str:
    """Format a count: `12,340`."""
    return f"{round(value):,}" if known(value) else UNKNOWN


def _few(value: float) -> str:
    """Format three digits, without trailing zeros."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def _steady(value: float) -> str:
    """Format exactly three digits."""
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 or not value else f"{value:.2f}"


@dataclass(frozen=True, kw_only=True)
class Style:
    """How quantities are formatted."""

    gap: str
    """Between a number and its unit."""
    digits: Callable[[float], str]
    """Writes a number below 1000."""
    bytes_units: tuple[str, ...]
    """Powers of 1024."""
    time_units: tuple[str, str, str, str]
    """Of days, hours, minutes, seconds."""
    minutes_from_s: float
    """Shorter times are in seconds and fractions of them."""
    ratio_digits: int
    """Decimals of a percentage."""
    multiples: tuple[tuple[float, str], ...] = ()
    """Suffixes for multiples; () where there is room for all digits."""

    def seconds(self, value: float | None) -> str:
        """Format a duration: `350 us`, `12.3 ms`, `4.56 s`, then as `took`."""
        if not known(value):
            return UNKNOWN
        if abs(value) >= self.minutes_from_s:
            return self.took(value)
        if not value:
            return f"0{self.gap}s"
        parts = _PARTS_OF_A_SECOND
        scale, unit = next((part for part in parts if abs(value) >= _JUST * part[0]), parts[-1])
        return f"{self.digits(value / scale)}{self.gap}{unit}"

    def took(self, value: float | None) -> str:
        """Format a duration in whole seconds and more: `42 s`, `3 min 05 s`, `2 h 07 min`, `1 d 04 h`."""
        if not known(value):
            return UNKNOWN
        day, hour, minute, second = (f"{self.gap}{unit}" for unit in self.time_units)
        sign, length = "-" if value < 0 else "", round(abs(value))
        if length >= 86400:
            days, hours = divmod(round(length / 3600), 24)
            return f"{sign}{days}{day} {hours:02}{hour}"
        if length >= 3600:
            hours, minutes = divmod(round(length / 60), 60)
            return f"{sign}{hours}{hour} {minutes:02}{minute}"
        minutes, seconds = divmod(length, 60)
        return f"{sign}{minutes}{minute} {seconds:02}{second}" if minutes else f"{sign}{seconds}{second}"

    def size(self, value: float | None) -> str:
        """Format bytes: `512 B`, `1.5 GiB`."""
        if not known(value):
            return UNKNOWN
        power = 0
        while abs(value) >= 1023.5 and power < len(self.bytes_units) - 1:
            value, power = value / 1024, power + 1
        told = self.digits(value) if power else f"{value:.0f}"
        return f"{told}{self.gap}{self.bytes_units[power]}"

    def ratio(self, value: float | None) -> str:
        """Format a ratio: `40.4 %`."""
        return f"{100 * value:.{self.ratio_digits}f}{self.gap}%" if known(value) else UNKNOWN

    def hertz(self, value: float | None) -> str:
        """Format a clock rate: `1.98 GHz`."""
        if not known(value):
            return UNKNOWN
        multiples = _MULTIPLES_OF_A_HERTZ
        scale, unit = next((each for each in multiples if abs(value) >= _JUST * each[0]), multiples[-1])
        return f"{self.digits(value / scale)}{self.gap}{unit}"

    def measured(self, name: str, value: float) -> tuple[str, str]:
        """Return a figure's name as text, and its value in the unit of the name: for `blocked_seconds_per_step`,
        `blocked per step` and `12.3 ms`."""
        words = name.split("_")
        units = {"seconds": self.seconds, "bytes": self.size, "ratio": self.ratio, "hertz": self.hertz}
        at = next((at for at, word in enumerate(words) if word in units), None)
        if at is None:
            return " ".join(words), count(value) if float(value).is_integer() else self.number(value)
        told = units[words[at]](value)
        return " ".join(words[:at] + words[at + 1 :] if at else words), told  # `bytes_per_step` keeps its name

    def number(self, value: float | None) -> str:
        """Format any other number, to three digits."""
        if not known(value):
            return UNKNOWN
        for multiple, unit in self.multiples:
            if abs(value) >= _JUST * multiple:
                return self.digits(value / multiple) + unit
        return f"{value:,.0f}" if abs(value) >= 999.5 else self.digits(value)


PROSE: Final = Style(
    gap=" ",
    digits=_few,
    bytes_units=("B", "KiB", "MiB", "GiB", "TiB", "PiB"),
    time_units=("d", "h", "min", "s"),
    minutes_from_s=59.95,
    ratio_digits=1,
)
CELLS: Final = Style(
    gap="",
    digits=_steady,
    bytes_units=("B", "K", "M", "G", "T"),
    time_units=("d", "h", "m", "s"),
    minutes_from_s=100.0,
    ratio_digits=0,
    multiples=((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")),
)
