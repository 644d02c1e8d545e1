"""The terminal application: handles keys, reads in a thread, and shows the frames made by `frame`."""

from __future__ import annotations

import locale
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input

from gpulaunch.exporters.tui.cells import Line, plain
from gpulaunch.exporters.tui.errand import Errand, Task
from gpulaunch.exporters.tui.frame import frame, scrolled
from gpulaunch.exporters.tui.header import PAGES
from gpulaunch.exporters.tui.look import Look, Output, Page
from gpulaunch.exporters.tui.ranks import SORTS, FilterError, chosen, filter_of, selected
from gpulaunch.exporters.tui.reader import Reader, Seen, Want
from gpulaunch.exporters.tui.tail import STREAMS, LogPlace
from gpulaunch.exporters.view.model import RunView, Status

_STALE_S: Final = 3.0
_OUTPUT_LINES: Final = 2000
_WINDOWS: Final = {None: 600.0, 600.0: 60.0, 60.0: None}
_OF_RANKS: Final = (Page.RANKS, Page.INPUT, Page.MEMORY)
"""Pages with a table of ranks: up and down select one."""
_WITH_RANK: Final = (*_OF_RANKS, Page.RANK, Page.LOG)

_PLAIN: Final = Style()
"""Not None: the filters of Textual access the style of every segment."""
_STYLES: Final[dict[str, Style]] = {
    "strong": Style(bold=True),
    "dim": Style(dim=True),
    "title": Style(bold=True, underline=True),
    "good": Style(color="green"),
    "bad": Style(color="red", bold=True),
    "warn": Style(color="yellow"),
    "selected": Style(reverse=True),
    "open": Style(reverse=True, bold=True),
    "tab": Style(),
    "footer": Style(reverse=True),
    "curve": Style(color="cyan"),
    # of a step, and of a run; the letters carry the same information
    "data_wait": Style(color="red"),
    "h2d": Style(color="bright_red"),
    "forward": Style(color="green"),
    "backward": Style(color="bright_green"),
    "comm": Style(color="magenta"),
    "optimizer": Style(color="blue"),
    "sync": Style(color="yellow"),
    "checkpoint": Style(color="bright_blue"),
    "compile": Style(color="cyan"),
    "gc": Style(color="bright_yellow"),
    "validation": Style(color="bright_cyan"),
    "other": Style(color="white", dim=True),
    "productive": Style(color="green"),
    "checkpoint_stall": Style(color="bright_blue"),
    "detection": Style(color="yellow"),
    "teardown": Style(color="bright_yellow"),
    "restart": Style(color="magenta"),
    "lost_work": Style(color="red"),
    "startup": Style(color="cyan"),
}


class Board(Widget):
    """The widget of the whole screen: lines."""

    can_focus = True

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []

    def show(self, lines: list[Line]) -> None:
        """Show these lines from now on."""
        self.lines = lines
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return one line, as wide as the screen."""
        spans = self.lines[y] if y < len(self.lines) else ()
        segments = [Segment(text, _STYLES.get(style, _PLAIN)) for text, style in spans]
        return Strip(segments).adjust_cell_length(self.size.width, _PLAIN)


class Top(App[None]):
    """`gpulaunch top` on a terminal."""

    TITLE = "gpulaunch top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Board { width: 1fr; height: 1fr; }
    #filter { dock: bottom; height: 1; border: none; padding: 0; display: none; }
    #filter.asked { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c,ctrl+q", "quit", "quit", priority=True),
        Binding("question_mark,f1", "page('help')", "help"),
        *(Binding(str(number), f"page('{page.value}')", page.value) for number, page in enumerate(PAGES[:-1], 1)),
        Binding("9", "page('output')", "output"),
        Binding("tab", "turn(1)", "next page", priority=True),
        Binding("shift+tab", "turn(-1)", "page before", priority=True),
        Binding("escape", "leave", "back", priority=True),
        Binding("enter", "page('rank')", "one rank"),
        Binding("l", "page('log')", "log"),
        Binding("up,k", "move(-1)", "up"),
        Binding("down,j", "move(1)", "down"),
        Binding("pageup", "screens(-1)", "screen up"),
        Binding("pagedown,space", "screens(1)", "screen down"),
        Binding("home,g", "move(-1000000)", "first"),
        Binding("end,G", "move(1000000)", "last"),
        Binding("s", "sort(1)", "sort"),
        Binding("S", "sort(-1)", "sort"),
        Binding("r", "reverse", "reverse"),
        Binding("slash", "filter", "filter"),
        Binding("w", "window", "window"),
        Binding("e", "stream", "stream"),
        Binding("left_square_bracket", "attempt(-1)", "attempt before"),
        Binding("right_square_bracket", "attempt(1)", "attempt after"),
        Binding("d", "dump", "stack"),
        Binding("t", "trace(False)", "trace"),
        Binding("T", "trace(True)", "trace all"),
    ]

    class Read(Message):
        """The reader has new data."""

        def __init__(self, seen: Seen) -> None:
            super().__init__()
            self.seen = seen

    class Said(Message):
        """An errand has printed a line; None: it has ended."""

        def __init__(self, of: Errand, text: str | None) -> None:
            super().__init__()
            self.of = of
            self.text = text

    def __init__(
        self,
        run_dir: Path,
        *,
        dump: Callable[[RunView, int], Task] | None = None,
        trace: Callable[[int | None], Task] | None = None,
        reader: Callable[[Callable[[Seen], None]], Reader] | None = None,
    ) -> None:
        """Show the run in `run_dir`.

        Args:
            run_dir: its directory.
            dump: returns the task that dumps the stack of a rank; None: not available.
            trace: returns the task that traces a rank, or all (None).
            reader: creates the reader, from the callback for its results.
        """
        super().__init__(ansi_color=True)  # the terminal's own colours and background
        self.view: RunView | None = None
        self.fault: Exception | None = None
        """The bug that ended the application, if any; the caller reports it in one line."""
        self.look = Look(ascii_only="utf" not in locale.getpreferredencoding(False).lower())
        self._dump = dump
        self._trace = trace
        self._reader = Reader(run_dir, self._told) if reader is None else reader(self._told)
        self._errand: Errand | None = None
        self._asked_to_trace = ""

    # -- the screen

    def compose(self) -> ComposeResult:
        """Return the board, and the input line of the filter."""
        yield Board()
        yield Input(id="filter", placeholder="ranks: 3, 8-15, n1 (node 1), ! (marked); empty: all", max_length=200)

    def on_mount(self) -> None:
        """Start reading."""
        self.query_one(Board).focus()
        self._reader.start()
        self.set_interval(0.5, self._watch)
        self._draw()

    def on_unmount(self) -> None:
        """Stop the reader and the errand."""
        self._reader.close()
        if self._errand is not None:
            self._errand.close()

    def on_resize(self, event: Resize) -> None:
        """Draw for the new size."""
        self._draw(width=event.size.width, height=event.size.height)

    def _draw(self, *, width: int | None = None, height: int | None = None) -> None:
        width, height = width or self.size.width, height or self.size.height
        asking = self.query_one("#filter").has_class("asked")
        try:
            lines = frame(self.view, self.look, width, height - asking)
        except Exception as error:  # a bug must cost only this frame, not the terminal
            lines = [((plain(f"cannot draw this: {type(error).__name__}: {error}; please report"), "bad"),)]
        self.query_one(Board).show(lines)

    def _set(self, **changes: Any) -> None:
        """Change the look, and redraw."""
        self._asked_to_trace = ""
        self.look = replace(self.look, **{"notice": "", **changes})
        self._reader.want(Want(window_s=self.look.window_s, log=self._log_place()))
        self._draw()

    def select(self, rank: int | None) -> None:
        """Select a rank; None: the first."""
        self._set(rank=rank)

    def _handle_exception(self, error: Exception) -> None:
        self.fault = self.fault or error
        super()._handle_exception(error)

    def _print_error_renderables(self) -> None:
        """Print no traceback: the caller reports `fault`."""

    # -- messages from other threads

    def _told(self, seen: Seen) -> None:
        self._post(self.Read(seen))

    def _post(self, message: Message) -> None:
        try:
            self.post_message(message)
        except RuntimeError:  # the loop is closed: the application has ended
            return

    def on_top_read(self, message: Read) -> None:
        """Show what was read."""
        seen = message.seen
        self.view = seen.view if seen.view is not None else self.view
        log = seen.log if seen.log is not None else self.look.log
        notice = seen.trouble if seen.trouble and self.view is not None else self.look.notice
        self.look = replace(self.look, log=log, trouble=seen.trouble, notice=notice, stale_seconds=0.0)
        self._reader.want(Want(window_s=self.look.window_s, log=self._log_place()))
        self._draw()

    def _watch(self) -> None:
        """Show when the disk does not respond."""
        busy_s = self._reader.busy_seconds()
        stale_s = busy_s if busy_s > _STALE_S else 0.0
        if stale_s or self.look.stale_seconds:
            self.look = replace(self.look, stale_seconds=stale_s)
            self._draw()

    def on_top_said(self, message: Said) -> None:
        """Show the output of an errand."""
        output = self.look.output
        if message.of is not self._errand or output is None:
            return
        if message.text is None:
            self._errand = None
            output = replace(output, running=False)
        else:
            output = replace(output, lines=(*output.lines, message.text)[-_OUTPUT_LINES:])
        self.look = replace(self.look, output=output)
        self._draw()

    # -- keys: navigation

    def action_page(self, name: str) -> None:
        """Open a page."""
        self._set(page=Page(name), top=0)

    def action_turn(self, by: int) -> None:
        """Open the next or the previous page."""
        pages = [page for page in PAGES if page is not Page.OUTPUT or self.look.output is not None]
        at = pages.index(self.look.page) if self.look.page in pages else -1
        self._set(page=pages[(at + by) % len(pages)], top=0)

    def action_leave(self) -> None:
        """Go back to the ranks, or out of the filter."""
        if self.query_one("#filter").has_class("asked"):
            self._ask(False)
        else:
            self._set(page=Page.RANKS, top=0)

    def action_move(self, by: int) -> None:
        """Select another rank, or scroll."""
        if self.view is None:
            return
        if self.look.page in _OF_RANKS:
            self._select(by)
            return
        most = scrolled(self.view, self.look, self.size.width, self.size.height)
        follows = self.look.page is Page.LOG or (
            self.look.page is Page.OUTPUT and self.look.output is not None and self.look.output.follow
        )
        self._set(top=max(0, min(most, self.look.top + (-by if follows else by))))

    def action_screens(self, by: int) -> None:
        """Move by one screen."""
        self.action_move(by * max(1, self.size.height - 10))

    def _select(self, by: int) -> None:
        assert self.view is not None, "keys before the first view do nothing"
        ranks = [rank.rank for rank in chosen(self.view, self.look)]
        here = selected(self.view, self.look)
        if here is not None:
            at = max(0, min(len(ranks) - 1, ranks.index(here.rank) + by))
            self._set(rank=ranks[at])

    def action_sort(self, by: int) -> None:
        """Sort the ranks by the next criterion."""
        names = list(SORTS)
        name = names[(names.index(self.look.sort) + by) % len(names)]
        self._set(sort=name, reverse=False, notice=f"sorted by {name}")

    def action_reverse(self) -> None:
        """Reverse the sort order."""
        self._set(reverse=not self.look.reverse)

    def action_window(self) -> None:
        """Change the time window of the curves."""
        window_s = _WINDOWS[self.look.window_s]
        told = "of the whole run" if window_s is None else f"of the last {window_s / 60:.0f} min"
        self._set(window_s=window_s, notice=f"curves {told}")

    # -- the filter

    def action_filter(self) -> None:
        """Prompt for a filter."""
        self._ask(True)

    def _ask(self, asked: bool) -> None:
        box = self.query_one("#filter", Input)
        box.set_class(asked, "asked")
        if asked:
            box.value = self.look.only
            box.focus()
        else:
            self.query_one(Board).focus()
        self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Apply the filter, or show why it is invalid."""
        try:
            filter_of(event.value)
        except FilterError as error:
            self._ask(False)
            self._set(notice=str(error))
            return
        self._ask(False)
        self._set(only=event.value.strip(), page=self.look.page if self.look.page in _OF_RANKS else Page.RANKS, top=0)

    # -- one rank: its log, its stack, a trace of it

    def _log_place(self) -> LogPlace | None:
        if self.look.page is not Page.LOG or self.view is None:
            return None
        rank = selected(self.view, self.look)
        newest = self.view.attempts[-1].place if self.view.attempts else None
        attempt = self.look.attempt if self.look.attempt is not None else newest
        if rank is None or attempt is None:
            return None
        return LogPlace(node=rank.node, attempt=attempt, rank=rank.rank, stream=self.look.stream)

    def action_stream(self) -> None:
        """Show the other stream."""
        self._set(stream=STREAMS[(STREAMS.index(self.look.stream) + 1) % len(STREAMS)], page=Page.LOG, top=0)

    def action_attempt(self, by: int) -> None:
        """Show the log of another attempt."""
        if self.view is None or not self.view.attempts:
            return
        places = [attempt.place for attempt in self.view.attempts]
        newest = len(places) - 1
        now = places.index(self.look.attempt) if self.look.attempt in places else newest
        at = max(0, min(newest, now + by))
        notice = self.view.attempts[at].name
        self._set(attempt=None if at == newest else places[at], page=Page.LOG, top=0, notice=notice)

    def action_dump(self) -> None:
        """Show the stack of the selected rank."""
        rank = selected(self.view, self.look) if self.view is not None else None
        if self.view is None or rank is None or self._dump is None:
            self._set(notice="there is no rank whose stack could be looked at")
        elif self.view.status is not Status.RUNNING:
            self._set(notice=f"the run is {self.view.status.value}: its ranks have no stack any more")
        else:
            self._begin(self._dump(self.view, rank.rank), f"stack of rank {rank.rank}", follow=False)

    def action_trace(self, every: bool) -> None:
        """Trace the selected rank, or all; needs a confirmation, because tracing slows them down."""
        rank = selected(self.view, self.look) if self.view is not None else None
        if self.view is None or rank is None or self._trace is None:
            self._set(notice="there is no rank to trace")
            return
        if self.view.status is not Status.RUNNING:
            self._set(notice=f"the run is {self.view.status.value}: there is nothing to trace")
            return
        whom = "all ranks" if every else f"rank {rank.rank}"
        if self._asked_to_trace != whom:
            key = "T" if every else "t"
            self._set(notice=f"a trace makes {whom} slower for its 5 steps: {key} once more to begin")
            self._asked_to_trace = whom
            return
        self._begin(self._trace(None if every else rank.rank), f"trace of {whom}", follow=True)

    def _begin(self, task: Task, title: str, *, follow: bool) -> None:
        if self._errand is not None:
            self._set(notice="one after the other: the last dump or trace is not over yet", page=Page.OUTPUT)
            return

        def say(text: str | None) -> None:
            self._post(self.Said(errand, text))

        errand = Errand(task, say)
        self._errand = errand
        self._set(output=Output(title=title, running=True, follow=follow), page=Page.OUTPUT, top=0)
        errand.start()
