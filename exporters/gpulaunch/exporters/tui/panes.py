"""The contents of the tabs: a page on the ranks, the log of a rank, the output of a dump or a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rich.console import Group
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widgets import Static, TabPane

from gpulaunch.exporters.tui.commands import NamedTask
from gpulaunch.exporters.tui.pages import Page
from gpulaunch.exporters.tui.selection import Selection, selected
from gpulaunch.exporters.tui.tail import STREAMS, LogPlace, Tail
from gpulaunch.exporters.tui.task import BackgroundTask
from gpulaunch.exporters.tui.text import plain, size
from gpulaunch.exporters.tui.widgets import Log, RankTable, Scroll
from gpulaunch.exporters.view.model import RunView

_OUTPUT_LINES: Final = 2000


class PagePane(TabPane):
    """One of `PAGES`: a text, or a table of ranks with text above and below it."""

    def __init__(self, number: int, page: Page, on_cursor: Callable[[int], None]) -> None:
        """`on_cursor` is called with the rank that the user moves the cursor to."""
        super().__init__(f"{number} {page.name}", id=page.name)
        self._page = page
        self._on_cursor = on_cursor

    @property
    def has_table(self) -> bool:
        """Whether it has a table of ranks."""
        return bool(self._page.columns)

    def compose(self) -> ComposeResult:
        """Return its texts and its table."""
        if not self.has_table:
            yield Scroll(Static(classes="above"))
            return
        head = VerticalScroll(Static(classes="above"), classes="head")
        head.can_focus = False  # its bar only says that there is more than fits
        yield head
        yield RankTable(self._on_cursor)
        yield Static(classes="below")

    def show(self, view: RunView, selection: Selection) -> None:
        """Show this view."""
        self.show_texts(view, selection)
        for table in self.query(RankTable):
            table.show(self._page, view, selection)

    def show_texts(self, view: RunView, selection: Selection) -> None:
        """Show the texts of this view, and leave the table as it is."""
        for name, text in (("above", self._page.text), ("below", self._page.below)):
            for widget in self.query(f".{name}").results(Static):
                widget.update(Group(*text(view, selection)))


class LogPane(TabPane):
    """The log of the selected rank, with the choice of its stream and attempt."""

    def __init__(self) -> None:
        super().__init__("8 log", id="log")
        self._stream = STREAMS[0]
        self._attempt: int | None = None
        """Attempt of the log, by the number of its directory; None: the newest."""
        self._shown: tuple[Tail | None, int] = (None, 0)

    def compose(self) -> ComposeResult:
        """Return its title and its lines."""
        yield Static(classes="above")
        yield Log()

    def place(self, view: RunView, selection: Selection) -> LogPlace | None:
        """Return which log to read."""
        rank = selected(view, selection)
        newest = view.attempts[-1].place if view.attempts else None
        attempt = self._attempt if self._attempt is not None else newest
        if rank is None or attempt is None:
            return None
        return LogPlace(node=rank.node, attempt=attempt, rank=rank.rank, stream=self._stream)

    def next_stream(self) -> None:
        """Choose the other stream."""
        self._stream = STREAMS[(STREAMS.index(self._stream) + 1) % len(STREAMS)]

    def move_attempt(self, view: RunView, by: int) -> str:
        """Choose an attempt before or after this one; returns its name."""
        places = [attempt.place for attempt in view.attempts]
        newest = len(places) - 1
        now = places.index(self._attempt) if self._attempt in places else newest
        at = max(0, min(newest, now + by))
        self._attempt = None if at == newest else places[at]
        return view.attempts[at].name

    def show(self, view: RunView, selection: Selection, tail: Tail | None) -> None:
        """Show the end of a log; `tail` may still be that of another rank."""
        rank = selected(view, selection)
        if rank is None:
            head, lines = Text("no rank to show the log of", "dim"), Text()
        elif tail is None or tail.place.rank != rank.rank:
            tail, head, lines = None, Text(f"reading the log of rank {rank.rank}", "dim"), Text()
        else:
            its_end = "  (its end)" if tail.earlier else ""
            head = Text(plain(f"{tail.path}  {size(tail.size_bytes)}{its_end}"), "bold underline")
            lines = (
                Text(plain(tail.trouble), "yellow") if tail.trouble else Text("\n".join(tail.lines) or "nothing yet")
            )
        self.query_one(".above", Static).update(Group(head))
        before, now = self._shown, (tail, self.app.size.width)
        if before != now:
            log = self.query_one(Log)
            at_end = log.is_vertical_scroll_end or before[0] is None or tail is None or before[0].place != tail.place
            log.clear()
            log.add(lines, follow=at_end)
            self._shown = now


class OutputPane(TabPane):
    """The output of the last dump or trace, which runs in the background."""

    class Printed(Message, bubble=False):
        """The task has printed a line; None: it has ended."""

        def __init__(self, task: BackgroundTask, text: str | None) -> None:
            super().__init__()
            self.task = task
            self.text = text

    def __init__(self) -> None:
        super().__init__("9 output", id="output")
        self._background: BackgroundTask | None = None
        self._named: NamedTask | None = None

    @property
    def is_used(self) -> bool:
        """Whether there was a dump or a trace."""
        return self._named is not None

    @property
    def is_busy(self) -> bool:
        """Whether it is not over yet."""
        return self._background is not None

    def compose(self) -> ComposeResult:
        """Return its title and its lines."""
        yield Static(Text("d dumps the stack of the selected rank, t traces it, T all ranks"), classes="above")
        yield Log(max_lines=_OUTPUT_LINES)

    def on_unmount(self) -> None:
        """Stop the task."""
        if self._background is not None:
            self._background.close()

    def run(self, named: NamedTask) -> None:
        """Start a task, and show its output."""

        def say(text: str | None) -> None:
            try:
                self.post_message(self.Printed(running, text))
            except RuntimeError:  # the loop is closed: the application has ended
                return

        self._background = running = BackgroundTask(named.task, say)
        self._named = named
        self.query_one(".above", Static).update(Text(f"{named.title} ...", "bold underline"))
        self.query_one(Log).clear().scroll_home(animate=False)
        running.start()

    def on_output_pane_printed(self, message: Printed) -> None:
        """Show a line, or that the task has ended."""
        if message.task is not self._background or self._named is None or not self.query(Log):
            return
        if message.text is None:
            self._background = None
            self.query_one(".above", Static).update(Text(self._named.title, "bold underline"))
        else:
            self.query_one(Log).add(Text(plain(message.text)), follow=self._named.follow)
