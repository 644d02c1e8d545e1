"""Quantities as people read them, in two styles; what is not known is a dash in both.

In sentences and tables (`PROSE`) there is room for units as they are written, and no digit more than is known:
`12.3 ms`, `1.5 GiB`, `1,240`, `40.4 %`. In the cells of a terminal (`CELLS`) every column counts, and a figure that is
read every second keeps its width: `12.3ms`, `1.50G`, `1.24k`, `40%`.
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
"""From here on three digits round up to the next unit."""


def known(value: float | None) -> TypeGuard[float]:
    """Whether there is a number to be written."""
    return value is not None and math.isfinite(value)


def count(value: float | None) -> str:
    """How many: `12,340`."""
    return f"{round(value):,}" if known(value) else UNKNOWN


def _few(value: float) -> str:
    """Three digits, none of them for show."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def _steady(value: float) -> str:
    """Three digits, always."""
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 or not value else f"{value:.2f}"


@dataclass(frozen=True, kw_only=True)
class Style:
    """How quantities are written."""

    gap: str
    """Between a number and its unit."""
    digits: Callable[[float], str]
    """Writes a number below 1000."""
    bytes_units: tuple[str, ...]
    """Powers of 1024."""
    time_units: tuple[str, str, str, str]
    """Of days, hours, minutes, seconds."""
    minutes_from_s: float
    """What is shorter is told in seconds and parts of them."""
    ratio_digits: int
    """Of a percentage, behind the point."""
    multiples: tuple[tuple[float, str], ...] = ()
    """Short for many: none, where there is room for all digits."""

    def seconds(self, value: float | None) -> str:
        """A length of time: `350 us`, `12.3 ms`, `4.56 s`, then as `took`."""
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
        """A length of time in whole seconds and more: `42 s`, `3 min 05 s`, `2 h 07 min`, `1 d 04 h`."""
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
        """Bytes: `512 B`, `1.5 GiB`."""
        if not known(value):
            return UNKNOWN
        power = 0
        while abs(value) >= 1023.5 and power < len(self.bytes_units) - 1:
            value, power = value / 1024, power + 1
        told = self.digits(value) if power else f"{value:.0f}"
        return f"{told}{self.gap}{self.bytes_units[power]}"

    def ratio(self, value: float | None) -> str:
        """A share: `40.4 %`."""
        return f"{100 * value:.{self.ratio_digits}f}{self.gap}%" if known(value) else UNKNOWN

    def hertz(self, value: float | None) -> str:
        """A clock rate: `1.98 GHz`."""
        if not known(value):
            return UNKNOWN
        multiples = _MULTIPLES_OF_A_HERTZ
        scale, unit = next((each for each in multiples if abs(value) >= _JUST * each[0]), multiples[-1])
        return f"{self.digits(value / scale)}{self.gap}{unit}"

    def measured(self, name: str, value: float) -> tuple[str, str]:
        """Give the name of a figure in words, and it in the unit that the name has: of `blocked_seconds_per_step`,
        `blocked per step` and `12.3 ms`."""
        words = name.split("_")
        units = {"seconds": self.seconds, "bytes": self.size, "ratio": self.ratio, "hertz": self.hertz}
        at = next((at for at, word in enumerate(words) if word in units), None)
        if at is None:
            return " ".join(words), count(value) if float(value).is_integer() else self.number(value)
        told = units[words[at]](value)
        return " ".join(words[:at] + words[at + 1 :] if at else words), told  # `bytes_per_step` is called so

    def number(self, value: float | None) -> str:
        """Any other number, to three digits."""
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
