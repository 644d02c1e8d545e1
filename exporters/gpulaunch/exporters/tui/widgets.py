"""The widgets of Textual as `top` uses them: the same keys in all of them, and a table of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Input, RichLog

from gpulaunch.exporters.tui.pages import Page
from gpulaunch.exporters.tui.selection import Selection, marks_of, selected
from gpulaunch.exporters.tui.tables import Column, cell, fitting, title
from gpulaunch.exporters.view.model import RunView
from gpulaunch.exporters.view.rank_model import RankView


def _aliases(*, up: str, down: str, first: str, last: str) -> list[BindingType]:
    """Return the keys for these actions that the widgets of Textual lack."""
    actions = {"k": up, "j": down, "space": "page_down", "g,home": first, "G,end": last}
    return [Binding(key, action, show=False) for key, action in actions.items()]


class Scroll(VerticalScroll):
    """A text that may be longer than the screen."""

    BINDINGS: ClassVar[list[BindingType]] = _aliases(
        up="scroll_up", down="scroll_down", first="scroll_home", last="scroll_end"
    )


class Log(RichLog):
    """The lines of a log or of a command."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *Scroll.BINDINGS,
        Binding("e", "app.stream", "stdout/stderr"),
        Binding("right_square_bracket", "app.attempt(1)", "attempt", key_display="[ ]"),
    ]

    def __init__(self, *, max_lines: int | None = None) -> None:
        super().__init__(max_lines=max_lines, wrap=True, auto_scroll=False)

    def add(self, text: Text, *, follow: bool) -> None:
        """Add lines at the end, and scroll to it if `follow`."""
        self.write(
            text, width=self.app.size.width - 1, scroll_end=follow
        )  # its own width is 0 on a page that is hidden


class FilterInput(Input):
    """The input line of the filter; hidden until it is asked for."""

    def __init__(self) -> None:
        super().__init__(id="filter", placeholder="ranks: 3, 8-15, n1 (node 1), ! (marked); empty: all", max_length=200)

    def open(self, text: str) -> None:
        """Ask for a filter, beginning with this one."""
        self.add_class("asked")
        self.value = text
        self.focus()

    def close(self) -> bool:
        """Hide it; returns whether it was open."""
        was_open = self.has_class("asked")
        self.remove_class("asked")
        return was_open


class RankCell:
    """A cell that is formatted when it is drawn: a screen shows only some of hundreds of ranks."""

    def __init__(self, ranks: Mapping[str, tuple[RankView, str]], key: str, column: Column, cells: int) -> None:
        self.key = key
        self._ranks = ranks
        self._column = column
        self._cells = cells

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield cell(self._column, self._cells, *self._ranks[self.key])

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, 1)  # the column says how wide it is


class RankTable(DataTable[RankCell]):
    """A table with a row per rank, its key the number of the rank; the cursor is on the selected one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *_aliases(up="cursor_up", down="cursor_down", first="scroll_top", last="scroll_bottom"),
        Binding("s", "app.sort(1)", "sort"),
        Binding("slash", "app.filter", "filter", key_display="/"),
        Binding("enter", "select_cursor", "rank", key_display="enter"),
    ]

    def __init__(self, chosen: Callable[[int], None]) -> None:
        """`chosen` is called with the rank that the user moves the cursor to."""
        super().__init__(cursor_type="row", cell_padding=0, cursor_foreground_priority="renderable")
        self._chosen = chosen
        self._showing = False
        self._ranks: dict[str, tuple[RankView, str]] = {}

    def show(self, page: Page, view: RunView, selection: Selection) -> None:
        """Show the ranks of the page in their order, as they are now."""
        marks, here = marks_of(view), selected(view, selection)
        self._ranks.clear()
        self._ranks |= {str(rank.rank): (rank, marks.get(rank.rank, "")) for rank in page.rows(view, selection)}
        order = {key: at for at, key in enumerate(self._ranks)}
        columns = fitting(page.columns, view, self.app.size.width)
        self._showing = True
        try:
            if [column.width for column in self.ordered_columns] != [cells + 1 for _, cells in columns]:
                self.clear(columns=True)
                for column, cells in columns:
                    self.add_column(title(column, cells), width=cells + 1)
            if {key.value for key in self.rows} != order.keys():
                self.clear()
                for key in order:
                    self.add_row(*(RankCell(self._ranks, key, *column) for column in columns), key=key)
            self.sort(key=lambda row: order[row[0].key])  # this also redraws the cells
            if order:
                self.move_cursor(row=order.get(str(here.rank), 0) if here is not None else 0)
        finally:
            self._showing = False

    def watch_cursor_coordinate(self, old_coordinate: Coordinate, new_coordinate: Coordinate) -> None:
        """Report the rank at once: new data that came before `RowHighlighted` would move the cursor back."""
        super().watch_cursor_coordinate(old_coordinate, new_coordinate)
        if not self._showing and old_coordinate.row != new_coordinate.row:
            self._chosen(int(self.coordinate_to_cell_key(new_coordinate).row_key.value or 0))
