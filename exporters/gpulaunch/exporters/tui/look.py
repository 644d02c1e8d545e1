"""The UI state: one value that keys change and frames are drawn from."""

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
    """The output of a dump or a trace."""

    title: str
    lines: tuple[str, ...] = ()
    running: bool = False
    follow: bool = False
    """Whether to show its end."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """All inputs of a frame except the run."""

    page: Page = Page.RANKS
    rank: int | None = None
    """The selected one; None: the first."""
    sort: str = "rank"
    reverse: bool = False
    only: str = ""
    """Filter of ranks, as typed."""
    top: int = 0
    """Number of lines scrolled past: above, or below on a page that follows its end."""
    window_s: float | None = None
    """Curves show this many last seconds; None: the whole run."""
    stream: str = "stderr"
    attempt: int | None = None
    """Attempt of the log, by the number of its directory; None: the newest."""
    log: Tail | None = None
    output: Output | None = None
    notice: str = ""
    """One line about the last key; replaces the line of keys."""
    stale_seconds: float = 0.0
    """How long the disk has not responded."""
    trouble: str = ""
    """Why there is no view."""
    cursor: bool = True
    """Whether the selected rank is marked in tables."""
    ascii_only: bool = False


class Drawn(Sequence[Line]):
    """Rows that are drawn on access: a screen shows only some of hundreds of ranks."""

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
    """A page: fixed lines, and lines that scroll."""

    head: tuple[Line, ...] = ()
    rows: Sequence[Line] = ()
    focus: int | None = None
    """The row that must be visible; None: scrolled by the user."""
    tail: tuple[Line, ...] = ()
    follow: bool = False
    """Whether it follows its end."""
