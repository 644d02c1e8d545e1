"""What the reader has chosen to see: one value, which keys change and frames are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import overload

from gpulaunch.exporters.tui.cells import Line
from gpulaunch.exporters.tui.tail import Tail


class Page(Enum):
    """What fills the middle of the screen; the value is its title."""

    RANKS = "ranks"
    FINDINGS = "findings"
    INPUT = "input"
    COPIES = "copies"
    MEMORY = "memory"
    HISTORY = "history"
    RANK = "rank"
    LOG = "log"
    OUTPUT = "output"
    HELP = "help"


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a dump or a trace says."""

    title: str
    lines: tuple[str, ...] = ()
    running: bool = False
    follow: bool = False
    """Show the end of it."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Everything about a frame that is not the run."""

    page: Page = Page.RANKS
    rank: int | None = None
    """The selected one; None: the first there is."""
    sort: str = "rank"
    reverse: bool = False
    only: str = ""
    """Filter of ranks, as it was typed."""
    top: int = 0
    """Lines that are scrolled away: above, or below on a page that follows its end."""
    window_s: float | None = None
    """Curves are of the last so many seconds; None: of the whole run."""
    stream: str = "stderr"
    attempt: int | None = None
    """Of the log, by the number of its directory; None: the newest."""
    log: Tail | None = None
    output: Output | None = None
    notice: str = ""
    """One line about the last key; it takes the place of the keys."""
    stale_seconds: float = 0.0
    """For how long the disk has not answered."""
    trouble: str = ""
    """Why there is no view."""
    cursor: bool = True
    """Whether the selected rank is marked in tables."""
    ascii_only: bool = False


class Drawn(Sequence[Line]):
    """Rows that are drawn when they are looked at: of hundreds of ranks a screen shows some."""

    def __init__(self, number: int, draw: Callable[[int], Line]) -> None:
        self._number = number
        self._draw = draw

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, at: int) -> Line: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Line]: ...
    def __getitem__(self, at: int | slice) -> Line | Sequence[Line]:
        if isinstance(at, slice):
            return [self._draw(one) for one in range(*at.indices(self._number))]
        if not -self._number <= at < self._number:
            raise IndexError(at)
        return self._draw(at % self._number)


@dataclass(frozen=True, kw_only=True)
class Body:
    """A page: lines that stay, and lines that scroll."""

    head: tuple[Line, ...] = ()
    rows: Sequence[Line] = ()
    focus: int | None = None
    """The row that has to be seen; None: the reader scrolls."""
    tail: tuple[Line, ...] = ()
    follow: bool = False
    """Its end is what counts."""
