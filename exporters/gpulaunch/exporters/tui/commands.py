"""Whether a dump or a trace can begin now: the task to run, or a notice why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpulaunch.exporters.tui.selection import Selection, selected
from gpulaunch.exporters.tui.task import Task
from gpulaunch.exporters.view.model import RunView, Status


@dataclass(frozen=True, kw_only=True)
class NamedTask:
    """A task to run in the background, with the title of its output."""

    task: Task
    title: str
    follow: bool
    """Show the end of its output, not the beginning."""


class Commands:
    """The dump and the trace, with the confirmation that a trace needs because it slows ranks down."""

    def __init__(self, dump: Callable[[RunView, int], Task] | None, trace: Callable[[int | None], Task] | None) -> None:
        """`dump` returns the task that dumps the stack of a rank, `trace` that traces a rank, or all (None)."""
        self._dump = dump
        self._trace = trace
        self._asked = ""
        """What `t` or `T` traces when it is pressed once more."""

    def forget_question(self) -> None:
        """Another key was pressed: a trace must be asked for again."""
        self._asked = ""

    def dump(self, view: RunView | None, selection: Selection) -> NamedTask | str:
        """Return the task that shows the stack of the selected rank, or a notice."""
        rank = selected(view, selection) if view is not None else None
        if view is None or rank is None or self._dump is None:
            return "there is no rank whose stack could be looked at"
        if view.status is not Status.RUNNING:
            return f"the run is {view.status.value}: its ranks have no stack any more"
        return NamedTask(task=self._dump(view, rank.rank), title=f"stack of rank {rank.rank}", follow=False)

    def trace(self, view: RunView | None, selection: Selection, *, every: bool) -> NamedTask | str:
        """Return the task that traces the selected rank, or all, if it was asked for twice, or a notice."""
        rank = selected(view, selection) if view is not None else None
        if view is None or rank is None or self._trace is None:
            return "there is no rank to trace"
        if view.status is not Status.RUNNING:
            return f"the run is {view.status.value}: there is nothing to trace"
        whom = "all ranks" if every else f"rank {rank.rank}"
        if self._asked != whom:
            self._asked = whom
            key = "T" if every else "t"
            return f"a trace makes {whom} slower for its 5 steps: {key} once more to begin"
        return NamedTask(task=self._trace(None if every else rank.rank), title=f"trace of {whom}", follow=True)
