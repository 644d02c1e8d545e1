"""The terminal application: a tab for each page, the keys, and a reader in a thread."""

from __future__ import annotations

import locale
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any, ClassVar, Final

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Event, Key
from textual.message import Message
from textual.widgets import Footer, Input, Static, TabbedContent, TabPane

from gpulaunch.exporters.tui.charts import Line
from gpulaunch.exporters.tui.pages import PAGES, Page
from gpulaunch.exporters.tui.reader import Reader, Request, Snapshot
from gpulaunch.exporters.tui.selection import SORTS, FilterError, Selection, filter_of, selected
from gpulaunch.exporters.tui.summary import summary
from gpulaunch.exporters.tui.tail import STREAMS, LogPlace, Tail
from gpulaunch.exporters.tui.task import BackgroundTask, Task
from gpulaunch.exporters.tui.text import plain, size, took
from gpulaunch.exporters.tui.widgets import Log, RankTable, Scroll
from gpulaunch.exporters.view.model import RunView, Status

_STALE_S: Final = 3.0
_NOTICE_S: Final = 10.0
_OUTPUT_LINES: Final = 2000
_WINDOWS: Final = {None: 600.0, 600.0: 60.0, 60.0: None}
_TABS: Final = (*(page.name for page in PAGES), "log", "output")
"""In the order of their keys, from 1."""

HELP: Final = """\
1-8, tab         ranks, findings, input, copies, memory, history, one rank, log
up, down, j, k   the rank above, below; lines, where there is no table of ranks
left, right      the rest of a table that is wider than the screen
pgup, pgdn       a screen up, down; home, end (g, G): the first, the last
enter            everything about the selected rank
l                its log;  e: stdout or stderr;  [ ]: attempt before, after
s, S             sort ranks by the next column;  r: the other way round
/                filter ranks: 3, 8-15, n1 (node 1), ! (marked); empty: all
w                curves of the whole run, the last 10 minutes, the last one
d                the stack of the selected rank, now (it is not stopped)
t, T             trace the selected rank, all of this node: gpulaunch trace
9                what the last dump or trace said
esc              back to the ranks;  q: quit

Bars:   D data_wait  H h2d  F forward  B backward  C comm  O optimizer  S sync
        K checkpoint  M compile  G gc  V validation  . other
Marks:  late: the others wait for it (finding `straggler`)
        still 40s: no step for so long;  off: nothing is measured in it
A dash is not known, and not 0. Times with + are since the run began."""


class Top(App[None]):
    """`gpulaunch top` on a terminal."""

    TITLE = "gpulaunch top"
    ENABLE_COMMAND_PALETTE = False
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]  # noqa: RUF012  # of App, which declares no ClassVar
    CSS = """
    VerticalScroll, RankTable, Log { scrollbar-size: 1 1; }
    #summary { height: auto; max-height: 50%; }
    TabbedContent { height: 1fr; }
    Tabs { height: 1; }
    Underline { display: none; }
    Tab.-active { text-style: reverse bold; }
    TabPane { padding: 0; height: 1fr; }
    ContentSwitcher { height: 1fr; }
    .above, .below { height: auto; }
    .head { height: auto; max-height: 50%; }
    RankTable, Log { height: 1fr; background: transparent; }
    RankTable { min-height: 3; }
    RankTable > .datatable--header { text-style: bold underline; background: transparent; }
    RankTable > .datatable--cursor, RankTable:focus > .datatable--cursor {
        text-style: reverse; background: transparent; color: ansi_default;
    }
    .-low .below { display: none; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    #filter.asked { display: block; }
    Toast { width: auto; max-width: 100%; border: none; padding: 0 1; color: ansi_yellow; }
    .-ascii VerticalScroll, .-ascii RankTable, .-ascii Log { scrollbar-size: 0 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark,f1", "page('help')", "help", key_display="?"),
        Binding("q", "quit", "quit"),
        Binding("ctrl+c,ctrl+q", "quit", "quit", priority=True, show=False),
        *(Binding(str(number), f"page('{name}')", show=False) for number, name in enumerate(_TABS, 1)),
        Binding("tab", "turn(1)", priority=True, show=False),
        Binding("shift+tab", "turn(-1)", priority=True, show=False),
        Binding("escape", "leave", priority=True, show=False),
        Binding("s", "sort(1)", show=False),
        Binding("S", "sort(-1)", show=False),
        Binding("r", "reverse", show=False),
        Binding("slash", "filter", show=False),
        Binding("enter", "page('rank')", show=False),
        Binding("l", "page('log')", "log"),
        Binding("e", "stream", show=False),
        Binding("left_square_bracket", "attempt(-1)", show=False),
        Binding("right_square_bracket", "attempt(1)", show=False),
        Binding("d", "dump", "stack"),
        Binding("t", "trace(False)", "trace"),
        Binding("T", "trace(True)", show=False),
        Binding("w", "window", "curves"),
    ]

    class Read(Message):
        """The reader has new data."""

        def __init__(self, snapshot: Snapshot) -> None:
            super().__init__()
            self.snapshot = snapshot

    class Output(Message):
        """A background task has printed a line; None: it has ended."""

        def __init__(self, task: BackgroundTask, text: str | None) -> None:
            super().__init__()
            self.task = task
            self.text = text

    def __init__(
        self,
        run_dir: Path,
        *,
        dump: Callable[[RunView, int], Task] | None = None,
        trace: Callable[[int | None], Task] | None = None,
        reader: Callable[[Callable[[Snapshot], None]], Reader] | None = None,
        notice: str = "",
    ) -> None:
        """Show the run in `run_dir`.

        Args:
            run_dir: its directory.
            dump: returns the task that dumps the stack of a rank; None: not available.
            trace: returns the task that traces a rank, or all (None).
            reader: creates the reader, from the callback for its results.
            notice: a line for the user, at first.
        """
        super().__init__(ansi_color=True)  # the terminal's own colours and background
        self.animation_level = "none"  # each would be bytes to send, often over ssh
        self._ascii_only = "utf" not in locale.getpreferredencoding(False).lower()
        if self._ascii_only:
            self.console.file = TextIOWrapper(BytesIO(), encoding="ascii")  # what rich's renderables ask
        self.view: RunView | None = None
        self.log_tail: Tail | None = None
        self.fault: Exception | None = None
        """The bug that ended the application, if any; the caller reports it in one line."""
        self.selection = Selection()
        self._window_s: float | None = None
        """Curves show this many last seconds; None: the whole run."""
        self._stream = STREAMS[0]
        self._attempt: int | None = None
        """Attempt of the log, by the number of its directory; None: the newest."""
        self._log_shown: tuple[Tail | None, int] = (None, 0)
        self._trouble = ""
        """Why the run could not be read the last time."""
        self._stale_s = 0.0
        """How long the disk has not responded."""
        self._dump = dump
        self._trace = trace
        self._notice = notice
        self._trace_asked = ""
        """What `t` or `T` traces when it is pressed once more."""
        self._background: BackgroundTask | None = None
        self._output_title = ""
        self._follow = False
        self._reader = Reader(run_dir, self._told) if reader is None else reader(self._told)

    # -- the screen

    def compose(self) -> ComposeResult:
        """Return the summary, a tab for each page, the input line of the filter, and the keys."""
        yield Static(id="summary")
        with TabbedContent(initial=_TABS[0]):
            for number, page in enumerate(PAGES, 1):
                with TabPane(f"{number} {page.name}", id=page.name):
                    if page.columns:
                        head = VerticalScroll(Static(classes="above"), classes="head")
                        head.can_focus = False  # its bar only says that there is more than fits
                        yield head
                        yield RankTable(self._chosen)
                        yield Static(classes="below")
                    else:
                        yield Scroll(Static(classes="above"))
            with TabPane("8 log", id="log"):
                yield Static(classes="above")
                yield Log()
            with TabPane("9 output", id="output"):
                yield Static(Text("d dumps the stack of the selected rank, t traces it, T all ranks"), classes="above")
                yield Log(max_lines=_OUTPUT_LINES)
            with TabPane("? help", id="help"):
                yield Scroll(Static(Text(HELP)))
        yield Input(id="filter", placeholder="ranks: 3, 8-15, n1 (node 1), ! (marked); empty: all", max_length=200)
        footer = Footer(show_command_palette=False)
        footer.compact = True
        yield footer

    def on_mount(self) -> None:
        """Start reading."""
        self._reader.start()
        self.screen.set_class(self._ascii_only, "-ascii")
        self.query_one("Tabs").can_focus = False
        self.set_interval(0.5, self._watch)
        self._set(page=_TABS[0], notice=self._notice)

    def on_unmount(self) -> None:
        """Stop the reader and the task."""
        self._reader.close()
        if self._background is not None:
            self._background.close()

    def on_resize(self) -> None:
        """Show as much as fits now."""
        self.call_after_refresh(self._show)

    @property
    def page(self) -> str:
        """The name of the open page."""
        return self.query_one(TabbedContent).active

    def _show(self) -> None:
        """Show what was read last."""
        if self._is_gone():
            return
        header = self.query_one("#summary", Static)
        try:
            header.update(Group(*self._summary()))
            self._show_page()
        except Exception as error:  # a bug must cost only this refresh, not the terminal
            told = f"cannot draw this: {type(error).__name__}: {error}; please report"
            header.update(Group(Line(plain(told), style="bold red")))

    def _is_gone(self) -> bool:
        """Whether the application ends: messages still come when it has no widgets any more."""
        return not self.query("#summary")

    def _summary(self) -> list[RenderableType]:
        parts: list[RenderableType] = []
        if self._stale_s:
            told = f"the disk has not answered for {took(self._stale_s)}"
            parts.append(Line(told + (": what is shown is of then" if self.view is not None else ""), style="yellow"))
        if self._trouble:
            parts.append(Text(plain(self._trouble), "yellow"))
        if self.view is not None:
            parts.append(summary(self.view))
        if str(self.selection):
            parts.append(Line(str(self.selection), style="yellow"))
        return parts or [Text("reading the run", "dim")]

    def _show_page(self) -> None:
        if self.view is None:
            return
        found = sum(finding.active for finding in self.view.findings)
        self.query_one(TabbedContent).get_tab("findings").label = "2 findings" + (f" ({found})" if found else "")
        if self.page == "log":
            self._show_log(self.view)
        for page in PAGES:
            if page.name == self.page:
                self._show_texts(page, self.view)
                for table in self.query_one(f"#{page.name}").query(RankTable):
                    table.show(page, self.view, self.selection)

    def _show_texts(self, page: Page, view: RunView) -> None:
        for name, text in (("above", page.text), ("below", page.below)):
            for widget in self.query_one(f"#{page.name}").query(f".{name}").results(Static):
                widget.update(Group(*text(view, self.selection)))

    def _show_log(self, view: RunView) -> None:
        rank, tail = selected(view, self.selection), self.log_tail
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
        self.query_one("#log .above", Static).update(Group(head))
        before, now = self._log_shown, (tail, self.size.width)
        if before != now:
            log = self.query_one("#log Log", Log)
            at_end = log.is_vertical_scroll_end or before[0] is None or tail is None or before[0].place != tail.place
            log.clear()
            log.add(lines, follow=at_end)
            self._log_shown = now

    def _set(self, *, page: str = "", notice: str = "", **selection: Any) -> None:
        """Apply what the user has chosen, and show it."""
        self.selection = replace(self.selection, **selection)
        if notice:
            self.notify(plain(notice), timeout=_NOTICE_S, markup=False)
        if page:
            self.query_one(TabbedContent).active = page
            main = self.query_one(f"#{page}").query("RankTable, Scroll, Log").first()
            self.call_after_refresh(main.focus)
        self._request()
        self._show()

    def select(self, rank: int | None) -> None:
        """Select a rank; None: the first."""
        self._set(rank=rank)

    def _handle_exception(self, error: Exception) -> None:
        self.fault = self.fault or error
        super()._handle_exception(error)

    def _print_error_renderables(self) -> None:
        """Print no traceback: the caller reports `fault`."""

    # -- messages from other threads

    def _told(self, snapshot: Snapshot) -> None:
        self._post(self.Read(snapshot))

    def _post(self, message: Message) -> None:
        try:
            self.post_message(message)
        except RuntimeError:  # the loop is closed: the application has ended
            return

    def on_top_read(self, message: Read) -> None:
        """Show what was read."""
        if self._is_gone():
            return
        snapshot = message.snapshot
        self.view = snapshot.view if snapshot.view is not None else self.view
        self.log_tail = snapshot.log if snapshot.log is not None else self.log_tail
        self._trouble, self._stale_s = snapshot.trouble, 0.0
        self._request()
        self._show()

    def _watch(self) -> None:
        """Show when the disk does not respond."""
        busy_s = self._reader.busy_seconds()
        stale_s = busy_s if busy_s > _STALE_S else 0.0
        if stale_s != self._stale_s:
            self._stale_s = stale_s
            self._show()

    def on_top_output(self, message: Output) -> None:
        """Show the output of a task."""
        if message.task is not self._background or self._is_gone():
            return
        if message.text is None:
            self._background = None
            self.query_one("#output .above", Static).update(Text(self._output_title, "bold underline"))
        else:
            self.query_one("#output Log", Log).add(Text(plain(message.text)), follow=self._follow)

    # -- keys: navigation

    async def on_event(self, event: Event) -> None:
        """Forget what was said about the key before."""
        if isinstance(event, Key):
            self.clear_notifications()
            if event.character not in ("t", "T"):
                self._trace_asked = ""
        await super().on_event(event)

    def action_page(self, name: str) -> None:
        """Open a page."""
        self._set(page=name)

    def action_turn(self, by: int) -> None:
        """Open the next or the previous page."""
        names = [name for name in _TABS if name != "output" or self._output_title]
        at = names.index(self.page) if self.page in names else -1
        self._set(page=names[(at + by) % len(names)])

    def action_leave(self) -> None:
        """Go back to the ranks, or out of the filter."""
        if self.query_one("#filter").has_class("asked"):
            self._ask(False)
        else:
            self._set(page="ranks")

    def _chosen(self, rank: int) -> None:
        """Select the rank that the cursor was moved to."""
        self.selection = replace(self.selection, rank=rank)
        for page in PAGES:
            if page.name == self.page and self.view is not None:
                self._show_texts(page, self.view)

    def on_data_table_row_selected(self) -> None:
        """Show everything about the selected rank."""
        self._set(page="rank")

    def action_sort(self, by: int) -> None:
        """Sort the ranks by the next criterion."""
        names = list(SORTS)
        name = names[(names.index(self.selection.sort) + by) % len(names)]
        self._set(sort=name, reverse=False, notice=f"sorted by {name}")

    def action_reverse(self) -> None:
        """Reverse the sort order."""
        self._set(reverse=not self.selection.reverse)

    def action_window(self) -> None:
        """Change the time window of the curves."""
        self._window_s = _WINDOWS[self._window_s]
        told = "of the whole run" if self._window_s is None else f"of the last {self._window_s / 60:.0f} min"
        self._set(notice=f"curves {told}")

    # -- the filter

    def action_filter(self) -> None:
        """Prompt for a filter."""
        self._ask(True)

    def _ask(self, asked: bool) -> None:
        box = self.query_one("#filter", Input)
        box.set_class(asked, "asked")
        if asked:
            box.value = self.selection.only
            box.focus()
        else:
            self._set(page=self.page)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Apply the filter, or show why it is invalid."""
        self._ask(False)
        try:
            filter_of(event.value)
        except FilterError as error:
            self._set(notice=str(error))
            return
        has_table = any(page.columns for page in PAGES if page.name == self.page)
        self._set(only=event.value.strip(), page=self.page if has_table else "ranks")

    # -- one rank: its log, its stack, a trace of it

    def _request(self) -> None:
        """Have the reader read what the open page needs."""
        self._reader.request(Request(window_s=self._window_s, log=self._log_place()))

    def _log_place(self) -> LogPlace | None:
        if self.page != "log" or self.view is None:
            return None
        rank = selected(self.view, self.selection)
        newest = self.view.attempts[-1].place if self.view.attempts else None
        attempt = self._attempt if self._attempt is not None else newest
        if rank is None or attempt is None:
            return None
        return LogPlace(node=rank.node, attempt=attempt, rank=rank.rank, stream=self._stream)

    def action_stream(self) -> None:
        """Show the other stream."""
        self._stream = STREAMS[(STREAMS.index(self._stream) + 1) % len(STREAMS)]
        self._set(page="log")

    def action_attempt(self, by: int) -> None:
        """Show the log of another attempt."""
        if self.view is None or not self.view.attempts:
            return
        places = [attempt.place for attempt in self.view.attempts]
        newest = len(places) - 1
        now = places.index(self._attempt) if self._attempt in places else newest
        at = max(0, min(newest, now + by))
        self._attempt = None if at == newest else places[at]
        self._set(page="log", notice=self.view.attempts[at].name)

    def action_dump(self) -> None:
        """Show the stack of the selected rank."""
        rank = selected(self.view, self.selection) if self.view is not None else None
        if self.view is None or rank is None or self._dump is None:
            self._set(notice="there is no rank whose stack could be looked at")
        elif self.view.status is not Status.RUNNING:
            self._set(notice=f"the run is {self.view.status.value}: its ranks have no stack any more")
        else:
            self._begin(self._dump(self.view, rank.rank), f"stack of rank {rank.rank}", follow=False)

    def action_trace(self, every: bool) -> None:
        """Trace the selected rank, or all; needs a confirmation, because tracing slows them down."""
        rank = selected(self.view, self.selection) if self.view is not None else None
        if self.view is None or rank is None or self._trace is None:
            self._set(notice="there is no rank to trace")
            return
        if self.view.status is not Status.RUNNING:
            self._set(notice=f"the run is {self.view.status.value}: there is nothing to trace")
            return
        whom = "all ranks" if every else f"rank {rank.rank}"
        if self._trace_asked != whom:
            key = "T" if every else "t"
            self._set(notice=f"a trace makes {whom} slower for its 5 steps: {key} once more to begin")
            self._trace_asked = whom
            return
        self._begin(self._trace(None if every else rank.rank), f"trace of {whom}", follow=True)

    def _begin(self, task: Task, title: str, *, follow: bool) -> None:
        """Run a task; `follow`: show the end of its output, not the beginning."""
        if self._background is not None:
            self._set(notice="one after the other: the last dump or trace is not over yet", page="output")
            return

        def say(text: str | None) -> None:
            self._post(self.Output(running, text))

        self._background = running = BackgroundTask(task, say)
        self._output_title, self._follow = title, follow
        self.query_one("#output .above", Static).update(Text(f"{title} ...", "bold underline"))
        self.query_one("#output Log", Log).clear().scroll_home(animate=False)
        self._set(page="output")
        running.start()
