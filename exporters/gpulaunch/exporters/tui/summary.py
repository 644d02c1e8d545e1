"""What is above every page: which run, its status, its speed, and where its time goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpulaunch.exporters.tui.charts import PHASES, Bar, Line, NamedCurve, legend
from gpulaunch.exporters.tui.selection import Selection
from gpulaunch.exporters.tui.text import figure, plain, ratio, seconds, took
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import RunView, Status

STATUS_STYLES: Final = {
    Status.RUNNING: "green",
    Status.FINISHED: "green",
    Status.FAILED: "bold red",
    Status.STOPPED: "yellow",
    Status.LOST: "bold red",
    Status.UNKNOWN: "dim",
}
_OLD_S: Final = 15.0
"""Data of a running run that is older than this is shown with its age."""
_NAME_CELLS: Final = 28
_LABEL_CELLS: Final = 6


def header(view: RunView | None, selection: Selection, *, trouble: str, stale_s: float) -> Group:
    """Return the summary of the view, with what is wrong with reading it and the selection.

    Args:
        view: the newest view, if there is one.
        selection: of the ranks.
        trouble: why the run could not be read the last time.
        stale_s: how long the disk has not responded.
    """
    lines: list[RenderableType] = []
    if stale_s:
        told = f"the disk has not answered for {took(stale_s)}"
        lines.append(Line(told + (": what is shown is of then" if view is not None else ""), style="yellow"))
    if trouble:
        lines.append(Text(plain(trouble), "yellow"))
    if view is not None:
        lines.append(summary(view))
    if str(selection):
        lines.append(Line(str(selection), style="yellow"))
    return Group(*(lines or [Text("reading the run", "dim")]))


def summary(view: RunView) -> Group:
    """Return the lines; fewer if less is known."""
    return Group(*_lines(view))


def _lines(view: RunView) -> Iterator[RenderableType]:
    yield _identity(view)
    yield _speed(view)
    if view.error or view.status in (Status.FAILED, Status.LOST):
        yield Line(plain(view.error) if view.error else _last_cause(view), style="bold red")
    if view.stall is not None:
        stands = f"no progress for {took(view.made_s - view.stall.since_s)}: {plain(view.stall.what)}"
        yield Text(stands, "bold red")
    if any(value is not None for value in view.steps_per_second):
        curves = Table.grid(expand=True, padding=(0, 1))
        curves.add_column(ratio=1)
        curves.add_column(ratio=1)
        curves.add_row(
            NamedCurve("steps/s", view.steps_per_second, figure), NamedCurve("step", view.step_mean_seconds, seconds)
        )
        yield curves
    if view.phase_ratios_now:
        yield shares("time", view.phase_ratios_now, Line(legend(view.phase_ratios_now)))


def shares(
    label: str,
    of: Mapping[str, float],
    meaning: RenderableType,
    letters: Mapping[str, tuple[str, str]] = PHASES,
) -> Table:
    """Return a bar of shares with its legend below it, and a label to the left; without one, both begin at the left."""
    table = Table.grid(expand=True)
    table.add_column(width=_LABEL_CELLS if label else 0)
    table.add_column(ratio=1)
    table.add_row(Text(label, "dim"), Bar(of, letters))
    table.add_row("", meaning)
    return table


def _identity(view: RunView) -> Line:
    name = plain(view.name or view.run_dir)
    parts: list[str | tuple[str, str]] = [
        (set_cell_size(name, min(cell_len(name), _NAME_CELLS)), "bold"),
        "  ",
        (view.status.value.upper(), STATUS_STYLES[view.status]),
    ]
    if view.stopped_by:
        parts.append(f" by {plain(view.stopped_by)}")
    elif view.exit_code:
        parts.append(f" exit code {view.exit_code}")
    if view.status is Status.RUNNING and view.phase not in ("", "running"):
        parts.append(f" ({plain(view.phase)})")
    if view.world_size is not None:
        nodes = f" on {view.num_nodes} nodes" if (view.num_nodes or 1) > 1 else ""
        parts.append(f"  {view.world_size} rank{'' if view.world_size == 1 else 's'}{nodes}")
    parts.append(f"  {took(view.elapsed_seconds)}")
    if view.status is Status.RUNNING and view.seen_s is not None and view.made_s - view.seen_s > _OLD_S:
        parts.append((f"  nothing new for {took(view.made_s - view.seen_s)}", "bold red"))
    parts.append((f"  goodput {'at most ' if view.goodput_at_most else ''}{ratio(view.goodput_ratio)}", "bold"))
    return Line(*parts)


def _speed(view: RunView) -> Line:
    parts = [
        f"{count(view.steps)} steps",
        f"{figure(view.steps_per_second_now)} steps/s",
        f"{seconds(view.step_seconds_now)} a step",
        f"attempt {UNKNOWN if view.attempt is None else view.attempt}",
        restarts(view),
        f"{figure(view.samples_per_second_now)} samples/s",
    ]
    if view.checkpoint_step is not None:
        parts.append(f"checkpoint {count(view.checkpoint_step)}")
    return Line("  ".join(parts))


def restarts(view: RunView) -> str:
    """Say how often it was restarted, and why."""
    total = sum(view.restarts.values())
    if not total:
        return "no restarts"
    kinds = ", ".join(f"{number} {plain(kind)}" for kind, number in view.restarts.items() if number)
    return f"{total} restart{'' if total == 1 else 's'} ({kinds})"


def _last_cause(view: RunView) -> str:
    causes = [attempt.cause for attempt in view.attempts if attempt.cause is not None and not attempt.earlier]
    return plain(causes[-1].headline) if causes else "it has not said how it ended"
