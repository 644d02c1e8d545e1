"""The header lines of every page: which run, its status, its speed, and where its time goes."""

from __future__ import annotations

from typing import Final

from gpulaunch.exporters.tui.cells import (
    Line,
    cells,
    clip,
    curve_line,
    figure,
    fit,
    line,
    plain,
    ratio,
    seconds,
    took,
    wrap,
)
from gpulaunch.exporters.tui.look import Look, Page
from gpulaunch.exporters.tui.phases import legend, shares_bar
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import RunView, Status

PAGES: Final = (
    *(Page.RANKS, Page.FINDINGS, Page.INPUT, Page.COPIES, Page.MEMORY, Page.HISTORY, Page.RANK, Page.LOG),
    Page.OUTPUT,
)
"""In the order of their keys, from 1."""

_STATUS: Final = {
    Status.RUNNING: "good",
    Status.FINISHED: "good",
    Status.FAILED: "bad",
    Status.STOPPED: "warn",
    Status.LOST: "bad",
    Status.UNKNOWN: "dim",
}
_OLD_S: Final = 15.0
"""Data of a running run that is older than this is shown with its age."""
_NAME_CELLS: Final = 28
_MOST_STALL_LINES: Final = 3


def header(view: RunView, look: Look, width: int) -> tuple[Line, ...]:
    """Return the header lines; fewer if less is known."""
    lines = [_who(view, width), _pace(view, width)]
    if view.error or view.status in (Status.FAILED, Status.LOST):
        why = plain(view.error) if view.error else _last_cause(view)
        lines.append(clip(line((why, "bad")), width))
    if view.stall is not None:
        stands = f"no progress for {took(view.made_s - view.stall.since_s)}: {plain(view.stall.what)}"
        lines += [line((each, "bad")) for each in wrap(stands, width, indent="  ")[:_MOST_STALL_LINES]]
    if any(value is not None for value in view.steps_per_second):
        lines.append(_curves(view, look, width))
    if view.phase_ratios_now:
        lines.append(line(("time  ", "dim"), *shares_bar(view.phase_ratios_now, max(8, width - 6))))
        lines.append(line("      ", *legend(view.phase_ratios_now, width - 6)))
    return tuple(clip(each, width) for each in lines)


def _who(view: RunView, width: int) -> Line:
    name = plain(view.name or view.run_dir)
    parts: list[tuple[str, str]] = [
        (fit(name, min(cells(name), _NAME_CELLS)), "strong"),
        ("  ", ""),
        (view.status.value.upper(), _STATUS[view.status]),
    ]
    if view.stopped_by:
        parts.append((f" by {plain(view.stopped_by)}", ""))
    elif view.exit_code:
        parts.append((f" exit code {view.exit_code}", ""))
    if view.status is Status.RUNNING and view.phase not in ("", "running"):
        parts.append((f" ({plain(view.phase)})", ""))
    if view.world_size is not None:
        nodes = f" on {view.num_nodes} nodes" if (view.num_nodes or 1) > 1 else ""
        parts.append((f"  {view.world_size} rank{'' if view.world_size == 1 else 's'}{nodes}", ""))
    parts.append((f"  {took(view.elapsed_seconds)}", ""))
    if view.status is Status.RUNNING and view.seen_s is not None and view.made_s - view.seen_s > _OLD_S:
        parts.append((f"  nothing new for {took(view.made_s - view.seen_s)}", "bad"))
    right = f"goodput {'at most ' if view.goodput_at_most else ''}{ratio(view.goodput_ratio)}"
    used = sum(cells(text) for text, _ in parts)
    if used + len(right) + 2 <= width:
        parts += [(" " * (width - used - len(right)), ""), (right, "strong")]
    return clip(tuple(parts), width)


def _pace(view: RunView, width: int) -> Line:
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
    told = parts[0]
    for part in parts[1:]:  # the last ones do not fit a narrow screen
        if cells(told) + 2 + cells(part) > width:
            break
        told += f"  {part}"
    return clip(line(told), width)


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


def _curves(view: RunView, look: Look, width: int) -> Line:
    half = max(20, (width - 2) // 2)
    return line(
        *curve_line("steps/s", view.steps_per_second, figure, half, ascii_only=look.ascii_only),
        "  ",
        *curve_line("step", view.step_mean_seconds, seconds, width - half - 2, ascii_only=look.ascii_only),
    )


def tabs(view: RunView, look: Look, width: int) -> Line:
    """Return the names of the pages, the open one in brackets."""
    found = sum(finding.active for finding in view.findings)
    spans: list[tuple[str, str]] = []
    for number, page in enumerate(PAGES, 1):
        if page is Page.OUTPUT and look.output is None:
            continue
        name = f"{number} {page.value}" + (f" ({found})" if page is Page.FINDINGS and found else "")
        spans.append((f"[{name}]", "open") if page is look.page else (f" {name} ", "tab"))
    if sum(len(text) for text, _ in spans) > width:  # 80 columns: numbers for all, the name of the open one
        spans = [
            (f"[{number} {page.value}]", "open") if page is look.page else (f" {number} {page.value[:4]}", "tab")
            for number, page in enumerate(PAGES, 1)
            if page is not Page.OUTPUT or look.output is not None
        ]
    return clip(tuple(spans), width)


def keys(look: Look, width: int) -> Line:
    """Return the last line: the effect of the last key, or the available keys."""
    if look.stale_seconds:
        told = f"the disk has not answered for {took(look.stale_seconds)}: what is shown is of then"
        return clip(line((fit(told, width), "warn")), width)
    if look.notice:
        return clip(line((fit(plain(look.notice), width), "warn")), width)
    own = "s sort  / filter  enter rank  l log"
    if look.page is Page.LOG:
        own = "e stdout/stderr  [ ] attempt"
    elif look.sort != "rank" or look.reverse or look.only:
        only = f", only {plain(look.only)}" if look.only else ""
        own = f"by {look.sort}{', reversed' if look.reverse else ''}{only}  enter rank  l log"
    told = f"? help  q quit  {own}  d stack  t trace  w curves"
    return clip(line((fit(told, width), "footer")), width)
