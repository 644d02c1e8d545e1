"""Charts of one line, as rich renderables that fill the width they are given.

Nothing depends on colour: a bar is made of letters, and a curve of block characters, or of ASCII where the terminal
has no others. Textual's Sparkline is not used: it scales from the smallest value, not from 0, has no gaps for unknown
values, and is a widget, which a cell of a table and `--once` cannot show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from gpulaunch.exporters.tui.text import plain, ratio
from gpulaunch.exporters.view.figures import UNKNOWN
from gpulaunch.exporters.view.rank_model import Curve

_BLOCKS: Final = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_TO_ASCII: Final = str.maketrans(_BLOCKS, "_.:-=+*#")
_CUT: Final = "~"
_SHORTEST: Final = 4
"""A curve of fewer cells is useless."""
_NOW: Final = 3
"""The current value is the newest one of this many intervals; older values do not count."""

PHASES: Final[Mapping[str, tuple[str, str]]] = {
    "data_wait": ("D", "red"),
    "h2d": ("H", "bright_red"),
    "forward": ("F", "green"),
    "backward": ("B", "bright_green"),
    "comm": ("C", "magenta"),
    "optimizer": ("O", "blue"),
    "sync": ("S", "yellow"),
    "checkpoint": ("K", "bright_blue"),
    "compile": ("M", "cyan"),
    "gc": ("G", "bright_yellow"),
    "validation": ("V", "bright_cyan"),
    "other": (".", "white dim"),
}
"""Letter and style of each phase of a step."""
GOODPUT: Final[Mapping[str, tuple[str, str]]] = {
    "productive": ("P", "green"),
    "checkpoint_stall": ("K", "bright_blue"),
    "detection": ("D", "yellow"),
    "teardown": ("T", "bright_yellow"),
    "restart": ("R", "magenta"),
    "lost_work": ("L", "red"),
    "startup": ("S", "cyan"),
}
"""Letter and style of each bucket of goodput."""
_UNNAMED: Final = ("?", "")
"""A phase from a newer version."""


class Chart:
    """A line that fills its width."""

    def draw(self, width: int) -> Text:
        """Return the line, at most this many cells wide."""
        raise NotImplementedError

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawn = self.draw(options.max_width)
        drawn.no_wrap, drawn.overflow = True, "crop"
        if options.ascii_only:
            drawn.plain = drawn.plain.translate(_TO_ASCII)
        yield drawn

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


class Line(Chart):
    """A text on one line: what does not fit is cut off, visibly."""

    def __init__(self, *parts: str | Text | tuple[str, str], style: str = "") -> None:
        """Each part is a text, or a text and its style."""
        self._text = Text.assemble(*parts, style=style)

    def draw(self, width: int) -> Text:
        """Return the text, or its beginning."""
        text = self._text.copy()
        if text.cell_len > width:
            text.truncate(max(0, width - 1), overflow="crop")
            text.append(_CUT if width > 0 else "")
        return text


class Bar(Chart):
    """Shares (0 to 1) as runs of letters, in the given order: less than half a cell is not drawn, and the rest to 1
    stays blank."""

    def __init__(self, shares: Mapping[str, float], letters: Mapping[str, tuple[str, str]] = PHASES) -> None:
        self._shares = shares
        self._letters = letters

    def draw(self, width: int) -> Text:
        """Return the bar, as wide as it may be."""
        drawn = Text()
        upto = 0.0
        for name, share in self._shares.items():
            upto = min(1.0, upto + share) if math.isfinite(share) and share > 0 else upto
            letter, style = self._letters.get(name, _UNNAMED)
            drawn.append(letter * (math.floor(upto * width + 0.5) - len(drawn)), style)
        drawn.pad_right(width - len(drawn))
        return drawn


class Spark(Chart):
    """A curve from 0 to its largest value, or to `most`; unknown values are gaps."""

    def __init__(
        self, curve: Curve, *, most: float | None = None, merge: Callable[[Sequence[float]], float] = fmean
    ) -> None:
        """`merge` makes one value of those that share a cell."""
        self._curve = curve
        self._most = most
        self._merge = merge

    def draw(self, width: int) -> Text:
        """Return the curve, at the right of the width."""
        curve = self._curve
        top = (max(_known(curve), default=0.0) if self._most is None else self._most) or math.inf
        columns = min(width, len(curve))
        drawn = ""
        for at in range(columns):
            values = _known(curve[at * len(curve) // columns : (at + 1) * len(curve) // columns])
            share = self._merge([max(0.0, min(1.0, value / top)) for value in values]) if values else None
            drawn += " " if share is None else _BLOCKS[round(share * (len(_BLOCKS) - 1))]
        return Text(drawn.rjust(width), "cyan")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, max(1, min(len(self._curve), options.max_width)))


class NamedCurve(Chart):
    """A curve between its name and its current and largest value."""

    def __init__(
        self, name: str, curve: Curve, told: Callable[[float | None], str], *, cells: int = 0, lasts: bool = True
    ) -> None:
        """Draw a curve.

        Args:
            name: what it shows; escaped.
            curve: its values.
            told: formats a value.
            cells: how wide the name is made; 0: as it is.
            lasts: if the current value is unknown, show the last known one: no step may have ended for a while.
        """
        self._name = set_cell_size(name, cells) if cells else name
        self._curve = curve
        self._told = told
        self._lasts = lasts

    def draw(self, width: int) -> Text:
        """Return the line."""
        known = _known(self._curve)
        if not known:
            return Text(f"{self._name} {UNKNOWN}", "dim")
        lately = known if self._lasts else _known(self._curve[-_NOW:])
        now = f" {self._told(lately[-1] if lately else None)}"
        most = f", max {self._told(max(known))}"
        room = width - cell_len(self._name) - 1 - len(now)
        after = now + most if room - len(most) >= _SHORTEST else now
        drawn = Spark(self._curve).draw(max(0, room + len(now) - len(after)))
        return Text.assemble((f"{self._name} ", "dim"), drawn, after)


def _known(curve: Curve) -> list[float]:
    return [value for value in curve if value is not None and math.isfinite(value)]


def legend(shares: Mapping[str, float], letters: Mapping[str, tuple[str, str]] = PHASES) -> Text:
    """Say what the letters mean and how much of each there is, the largest first."""
    told = Text()
    for name, share in sorted(shares.items(), key=lambda each: -each[1]):
        if share < 0.005:
            break
        letter, style = letters.get(name, _UNNAMED)
        told.append("  " if told else "").append(f"{letter}={plain(name)} {ratio(share)}", style)
    return told
