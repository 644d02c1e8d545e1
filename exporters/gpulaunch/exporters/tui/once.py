"""Prints a run once: its pages, one below the other."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Final

from rich.console import Console, RenderableType

from gpulaunch.exporters.tui.history import history
from gpulaunch.exporters.tui.pages import PAGES
from gpulaunch.exporters.tui.selection import Selection, marks_of
from gpulaunch.exporters.tui.summary import summary
from gpulaunch.exporters.tui.tables import rich_table
from gpulaunch.exporters.view.model import RunView

_EVENTS: Final = 20


def once(view: RunView, width: int, *, ascii_only: bool = False) -> str:
    """Return the pages as plain text, at most this many cells wide."""
    return as_text(_parts(view, width), width, ascii_only=ascii_only)


def as_text(parts: Iterator[RenderableType], width: int, *, ascii_only: bool = False) -> str:
    """Return what is shown, as plain text without blanks at the ends of lines."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if ascii_only else "utf-8")
    console = Console(file=file, width=width, color_system=None, legacy_windows=False, _environ={})
    with console.capture() as captured:
        for each in parts:
            console.print(each, markup=False, highlight=False, emoji=False)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _parts(view: RunView, width: int) -> Iterator[RenderableType]:
    selection, marks = Selection(), marks_of(view)
    yield summary(view)
    for page in PAGES:
        if page.name == "rank" or (page.name in ("input", "copies") and not view.ranks):
            continue
        if page.name == "memory" and not view.ranks and not view.nodes:
            continue
        yield f"\n== {page.name}"
        if page.name == "history":
            yield history(view, most_events=_EVENTS)
            continue
        yield from page.text(view, selection)
        if rows := page.rows(view, selection):
            yield rich_table(page.columns, view, rows, marks, width)
        if page.name != "ranks":
            yield from page.below(view, selection)
