"""The building blocks of a frame: text that fits its cells, bars, curves, formatted values.

A line is a tuple of spans, and a span is a text with the name of a style. Nothing depends on colour: a bar is made of
letters, and a curve of block characters, or of ASCII where the terminal has none.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from gpulaunch.exporters.view.figures import CELLS, UNKNOWN
from gpulaunch.exporters.view.model import Curve
from gpulaunch.exporters.view.text import inert

Span: TypeAlias = tuple[str, str]
"""A text and the name of its style; "" for none."""
Line: TypeAlias = tuple[Span, ...]

_BLOCKS: Final = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII_BLOCKS: Final = "_.:-=+*#"
_CUT: Final = "~"
_COLOURS: Final = re.compile(r"\x1b\[[0-9;:]{0,64}m")
_MARKS: Final = ("Mn", "Me")
_SHORTEST: Final = 4
"""A curve of fewer cells is useless."""
_NOW: Final = 3
"""The current value is the newest one of this many intervals; older values do not count."""


# -- text


def plain(text: object) -> str:
    """Return anything as one line that is safe for a terminal."""
    return inert(str(text))


def without_colours(text: str) -> str:
    """Drop the sequences that only set colours: this is more readable, and hides nothing."""
    return _COLOURS.sub("", text)


def cells(text: str) -> int:
    """Return how many cells a text takes: two for wide characters, none for combining marks."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def _cells_of(char: str) -> int:
    if char.isascii():
        return 1
    if unicodedata.category(char) in _MARKS:
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def fit(text: str, width: int) -> str:
    """Return the beginning of a text, padded to this many cells."""
    return _pad(_cut(text, width), width)


def fit_end(text: str, width: int) -> str:
    """Return the end of a text, the most useful part of a path, in at most this many cells."""
    return _cut(text[::-1], width)[::-1] if cells(text) > width else text


def _cut(text: str, width: int) -> str:
    if cells(text) <= width:
        return text
    if width <= 0:
        return ""
    return _head(text, width - 1) + _CUT


def _pad(text: str, width: int) -> str:
    return text + " " * (width - cells(text))


def line(*spans: Span | str) -> Line:
    """Return a line of spans; a bare text has no style."""
    return tuple((span, "") if isinstance(span, str) else span for span in spans)


def text_of(of: Line) -> str:
    """Return a line without its styles."""
    return "".join(text for text, _ in of)


def clip(of: Line, width: int) -> Line:
    """Return the part of a line that fits into this many cells."""
    kept: list[Span] = []
    for text, style in of:
        have = cells(text)
        if have > width:
            return (*kept, (_cut(text, width), style)) if width > 0 else tuple(kept)
        kept.append((text, style))
        width -= have
    return tuple(kept)


def wrap(text: str, width: int, *, indent: str = "") -> list[str]:
    """Break a text into lines of at most this many cells, between words where it can; all but the first are indented
    by `indent`."""
    width = max(12, width)
    now = text[: len(text) - len(text.lstrip(" "))]
    lines: list[str] = []
    begun = False
    for word in text.split():
        if begun and cells(now) + 1 + cells(word) > width:
            lines.append(now)
            now, begun = indent, False
        now += f" {word}" if begun else word
        begun = True
        while cells(now) > width:  # a word longer than a line
            head = _head(now, width)
            lines.append(head)
            now = indent + now[len(head) :]
    return [*lines, now]


def _head(text: str, width: int) -> str:
    """Return as many characters as fit into this many cells."""
    used = 0
    for at, char in enumerate(text):
        used += _cells_of(char)
        if used > width:
            return text[:at]
    return text


def broken(text: str, width: int) -> list[str]:
    """Break a text only at the width, not between words: program output may be a table."""
    parts: list[str] = []
    while cells(text) > width > 1:
        head = _head(text, width)
        parts.append(head)
        text = text[len(head) :]
    return [*parts, text]


# -- pictures


def spark(curve: Curve, width: int, *, ascii_only: bool = False, most: float | None = None) -> str:
    """Draw a curve from 0 to its largest value; unknown values are gaps."""
    known = [value for value in curve if value is not None and math.isfinite(value)]
    if not known or width <= 0:
        return " " * max(0, width)
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    top = max(known) if most is None else most
    drawn: list[str] = []
    columns = min(width, len(curve))
    for at in range(columns):
        part = curve[at * len(curve) // columns : (at + 1) * len(curve) // columns]
        values = [value for value in part if value is not None and math.isfinite(value)]
        if not values:
            drawn.append(" ")
            continue
        share = sum(max(0.0, min(1.0, value / top)) for value in values) / len(values) if top > 0 else 0.0
        drawn.append(blocks[round(share * (len(blocks) - 1))])
    return "".join(drawn).rjust(width)


def bar(parts: Sequence[tuple[str, str, float]], width: int) -> Line:
    """Draw parts (letter, style, share) as runs of their letter; less than half a cell is not drawn.

    Shares are of the whole width, so the rest to 1 stays blank.
    """
    if width <= 0:
        return ()
    drawn: list[Span] = []
    done, upto = 0, 0.0
    for letter, style, share in parts:
        upto = min(1.0, upto + share) if math.isfinite(share) and share > 0 else upto
        to = min(width, math.floor(upto * width + 0.5))
        if to > done:
            drawn.append((letter * (to - done), style))
            done = to
    if done < width:
        drawn.append((" " * (width - done), ""))
    return tuple(drawn)


def curve_line(
    name: str,
    curve: Curve,
    told: Callable[[float | None], str],
    width: int,
    *,
    ascii_only: bool,
    lasts: bool = True,
) -> Line:
    """Draw a curve between its name and its current and maximum values.

    `lasts`: if the current value is unknown, show the last known one: no step may have ended for a while.
    """
    known = [value for value in curve if value is not None and math.isfinite(value)]
    if not known:
        return clip(line((fit(f"{name} {UNKNOWN}", width), "dim")), width)
    lately = known if lasts else [value for value in curve[-_NOW:] if value is not None and math.isfinite(value)]
    newest = lately[-1] if lately else None
    after = f" {told(newest)}, max {told(max(known))}"
    if width - cells(name) - 1 - cells(after) < _SHORTEST:
        after = f" {told(newest)}"
    drawn = spark(curve, width - cells(name) - 1 - cells(after), ascii_only=ascii_only)
    return clip(line((f"{name} ", "dim"), (drawn, "curve"), after), width)


# -- figures


seconds, took, size, ratio, figure = CELLS.seconds, CELLS.took, CELLS.size, CELLS.ratio, CELLS.number


def pairs(of: Mapping[str, object]) -> str:
    """Return a mapping as `name=value name=value`, escaped; unknown values are left out."""
    return " ".join(f"{plain(name)}={_value(value)}" for name, value in of.items() if value not in (None, ""))


def measured(figures: Mapping[str, float | str]) -> str:
    """Return the evidence of a finding as `name in words figure; ...`, escaped, in the units of the names."""
    told = [
        (name.replace("_", " "), value[:400]) if isinstance(value, str) else CELLS.measured(name, value)
        for name, value in figures.items()
    ]
    return "; ".join(f"{plain(name)} {plain(value)}" for name, value in told)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        some = [(name, each) for name, each in list(value.items())[:40] if each]
        value = ", ".join(f"{name} {each:.4g}" if isinstance(each, float) else f"{name} {each}" for name, each in some)
    return plain(str(value)[:400])
