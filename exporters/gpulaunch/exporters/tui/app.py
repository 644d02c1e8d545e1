"""The terminal application: a tab for each page, the keys, and a reader in a thread."""

from __future__ import annotations

import locale
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any, ClassVar, Final

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.events import Event, Key
from textual.message import Message
from textual.widgets import Footer, Input, Static, TabbedContent, TabPane

from gpulaunch.exporters.tui import layout
from gpulaunch.exporters.tui.charts import Line
from gpulaunch.exporters.tui.commands import Commands, NamedTask
from gpulaunch.exporters.tui.layout import HELP, TABS
from gpulaunch.exporters.tui.pages import PAGES
from gpulaunch.exporters.tui.panes import LogPane, OutputPane, PagePane
from gpulaunch.exporters.tui.reader import Reader, Request, Snapshot
from gpulaunch.exporters.tui.selection import SORTS, FilterError, Selection, filter_of
from gpulaunch.exporters.tui.summary import header
from gpulaunch.exporters.tui.tail import Tail
from gpulaunch.exporters.tui.task import Task
from gpulaunch.exporters.tui.text import plain
from gpulaunch.exporters.tui.widgets import FilterInput, Scroll
from gpulaunch.exporters.view.model import RunView

_STALE_S: Final = 3.0
_NOTICE_S: Final = 10.0
_WINDOWS: Final = {None: 600.0, 600.0: 60.0, 60.0: None}


class Top(App[None]):
    """`gpulaunch top` on a terminal."""

    TITLE = "gpulaunch top"
    ENABLE_COMMAND_PALETTE = False
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]  # noqa: RUF012  # of App, which declares no ClassVar
    CSS = layout.CSS
    BINDINGS: ClassVar[list[BindingType]] = layout.BINDINGS

    class Read(Message):
        """The reader has new data."""

        def __init__(self, snapshot: Snapshot) -> None:
            super().__init__()
            self.snapshot = snapshot

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
        self._trouble = ""
        """Why the run could not be read the last time."""
        self._stale_s = 0.0
        """How long the disk has not responded."""
        self._commands = Commands(dump, trace)
        self._notice = notice
        self._reader = Reader(run_dir, self._told) if reader is None else reader(self._told)

    # -- the screen

    def compose(self) -> ComposeResult:
        """Return the summary, the tabs, the input line of the filter, and the keys."""
        yield Static(id="summary")
        with TabbedContent(initial=TABS[0]):
            for number, page in enumerate(PAGES, 1):
                yield PagePane(number, page, self._cursor_moved)
            yield LogPane()
            yield OutputPane()
            with TabPane("? help", id="help"):
                yield Scroll(Static(Text(HELP)))
        yield FilterInput()
        footer = Footer(show_command_palette=False)
        footer.compact = True
        yield footer

    def on_mount(self) -> None:
        """Start reading."""
        self._reader.start()
        self.screen.set_class(self._ascii_only, "-ascii")
        self.query_one("Tabs").can_focus = False
        self.set_interval(0.5, self._watch)
        self._set(page=TABS[0], notice=self._notice)

    def on_unmount(self) -> None:
        """Stop the reader."""
        self._reader.close()

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
        top = self.query_one("#summary", Static)
        try:
            top.update(header(self.view, self.selection, trouble=self._trouble, stale_s=self._stale_s))
            self._show_page()
        except Exception as error:  # a bug must cost only this refresh, not the terminal
            told = f"cannot draw this: {type(error).__name__}: {error}; please report"
            top.update(Group(Line(plain(told), style="bold red")))

    def _is_gone(self) -> bool:
        """Whether the application ends: messages still come when it has no widgets any more."""
        return not self.query("#summary")

    def _show_page(self) -> None:
        if self.view is None:
            return
        found = sum(finding.active for finding in self.view.findings)
        self.query_one(TabbedContent).get_tab("findings").label = "2 findings" + (f" ({found})" if found else "")
        if self.page == "log":
            self.query_one(LogPane).show(self.view, self.selection, self.log_tail)
        pane = self._open_page()
        if pane is not None:
            pane.show(self.view, self.selection)

    def _open_page(self) -> PagePane | None:
        return next((pane for pane in self.query(PagePane) if pane.id == self.page), None)

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

    # -- what the reader has read

    def _told(self, snapshot: Snapshot) -> None:
        try:
            self.post_message(self.Read(snapshot))
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

    # -- keys: navigation

    async def on_event(self, event: Event) -> None:
        """Forget what was said about the key before."""
        if isinstance(event, Key):
            self.clear_notifications()
            if event.character not in ("t", "T"):
                self._commands.forget_question()
        await super().on_event(event)

    def action_page(self, name: str) -> None:
        """Open a page."""
        self._set(page=name)

    def action_turn(self, by: int) -> None:
        """Open the next or the previous page."""
        has_output = self.query_one(OutputPane).is_used
        names = [name for name in TABS if name != "output" or has_output]
        at = names.index(self.page) if self.page in names else -1
        self._set(page=names[(at + by) % len(names)])

    def action_leave(self) -> None:
        """Go back to the ranks, or out of the filter."""
        self._set(page=self.page if self.query_one(FilterInput).close() else "ranks")

    def _cursor_moved(self, rank: int) -> None:
        """Select the rank that the cursor was moved to."""
        self.selection = replace(self.selection, rank=rank)
        pane = self._open_page()
        if pane is not None and self.view is not None:
            pane.show_texts(self.view, self.selection)

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
        self.query_one(FilterInput).open(self.selection.only)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Apply the filter, or show why it is invalid."""
        self.query_one(FilterInput).close()
        self._set(page=self.page)
        try:
            filter_of(event.value)
        except FilterError as error:
            self._set(notice=str(error))
            return
        pane = self._open_page()
        self._set(only=event.value.strip(), page=self.page if pane is not None and pane.has_table else "ranks")

    # -- one rank: its log, its stack, a trace of it

    def _request(self) -> None:
        """Have the reader read what the open page needs."""
        log = None
        if self.page == "log" and self.view is not None:
            log = self.query_one(LogPane).place(self.view, self.selection)
        self._reader.request(Request(window_s=self._window_s, log=log))

    def action_stream(self) -> None:
        """Show the other stream."""
        self.query_one(LogPane).next_stream()
        self._set(page="log")

    def action_attempt(self, by: int) -> None:
        """Show the log of another attempt."""
        if self.view is None or not self.view.attempts:
            return
        name = self.query_one(LogPane).move_attempt(self.view, by)
        self._set(page="log", notice=name)

    def action_dump(self) -> None:
        """Show the stack of the selected rank."""
        self._run_task(self._commands.dump(self.view, self.selection))

    def action_trace(self, every: bool) -> None:
        """Trace the selected rank, or all; needs a confirmation, because tracing slows them down."""
        self._run_task(self._commands.trace(self.view, self.selection, every=every))

    def _run_task(self, task: NamedTask | str) -> None:
        pane = self.query_one(OutputPane)
        if isinstance(task, str):
            self._set(notice=task)
        elif pane.is_busy:
            self._set(notice="one after the other: the last dump or trace is not over yet", page="output")
        else:
            pane.run(task)
            self._set(page="output")
