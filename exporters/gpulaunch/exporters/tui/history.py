"""The history page: attempts and their failures, where the time went, events, and what is unknown."""

from __future__ import annotations

from collections.abc import Sequence

from gpulaunch.exporters.tui.cells import Line, clip, line, pairs, plain, ratio, seconds, size, took, wrap
from gpulaunch.exporters.tui.header import restarts
from gpulaunch.exporters.tui.look import Body
from gpulaunch.exporters.tui.pages import since
from gpulaunch.exporters.tui.phases import GOODPUT_LETTERS, legend, shares_bar
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import AttemptView, RunView, Status


def history_page(view: RunView, width: int, *, most_events: int = 500) -> Body:
    """Return the page: attempts, newest first; then where the time of the run went; then events, newest first."""
    rows: list[Line] = []
    for place in reversed(range(len(view.attempts))):
        rows += _attempt(view, view.attempts[place:], width)
    rows += _goodput(view, width)
    told = [restarts(view), f"{count(view.hangs)} hang{'' if view.hangs == 1 else 's'}"]
    told += [f"{count(view.hang_suspicions)} standstill{'' if view.hang_suspicions == 1 else 's'} told"]
    told += ["preempted"] if view.preempted else []
    told += [f"resumed from step {count(view.resumed_step)}"] if view.resumed_step is not None else []
    rows += [line(each) for each in wrap("; ".join(told), width)]
    for note in view.notes:
        rows += [line((each, "warn")) for each in wrap(f"note: {plain(note)}", width, indent="  ")]
    rows += _watching(view, width)
    if view.events:
        rows += [line(""), line(("EVENTS", "title"))]
    for event in list(reversed(view.events))[:most_events]:
        node = f" n{event.node}" if event.node else ""
        text = f"{since(view, event.at_s):>9}{node} {plain(event.what)} {pairs(event.fields)}"
        rows.append(clip(line(text), width))
    if len(view.events) > most_events:
        rows.append(line((f"          ... and {len(view.events) - most_events} more", "dim")))
    return Body(rows=tuple(rows))


def _attempt(view: RunView, attempts: Sequence[AttemptView], width: int) -> list[Line]:
    """Return the lines of the first of these attempts; the others came later."""
    attempt = attempts[0]
    lasted = _lasted(view, attempts)
    style = "bad" if attempt.status in (Status.FAILED, Status.LOST) else "good"
    style = "warn" if attempt.status is Status.STOPPED else style
    name = f"{attempt.name} (earlier run)" if attempt.earlier else attempt.name
    head = f"{name}: {attempt.status.value} {since(view, attempt.began_s)}{lasted}"
    lines = [line((head, style))]
    cause = attempt.cause
    if cause is None:
        return lines
    lines += [
        line((each, "strong")) for each in wrap(f"   {plain(cause.kind)}: {plain(cause.headline)}", width, indent="   ")
    ]
    for text in (cause.why, cause.advice):
        if text:
            lines += [line(each) for each in wrap(f"   {plain(text)}", width, indent="   ")]
    if cause.report:
        lines += [line((each, "dim")) for each in wrap(f"   report: {plain(cause.report)}", width, indent="   ")]
    return lines


def _lasted(view: RunView, attempts: Sequence[AttemptView]) -> str:
    """Return how long the first of these attempts lasted, as in the report: if its end was not recorded, until the next
    one began."""
    first, *later = attempts
    if first.began_s is None:
        return ""
    if first.ended_s is not None:
        return f", {took(first.ended_s - first.began_s)}"
    until_s = view.ended_s if view.ended_s is not None else view.seen_s
    begins = [began_s for began_s in (*(each.began_s for each in later), view.began_s) if began_s is not None]
    next_s = min((began_s for began_s in begins if began_s > first.began_s), default=None)
    if next_s is not None and (until_s is None or next_s < until_s):
        return f", at most {took(next_s - first.began_s)}"
    return f", {took(None if until_s is None else until_s - first.began_s)}"


def _goodput(view: RunView, width: int) -> list[Line]:
    spent = {name: value for name, value in view.goodput_seconds.items() if value is not None and value > 0}
    total = view.goodput_whole_seconds
    if not spent:
        return []
    if view.goodput_ratio is None:
        known = ", ".join(f"{plain(name.replace('_', ' '))} {seconds(value)}" for name, value in spent.items())
        told = f"goodput not known, no step was seen; of {took(view.elapsed_seconds)}: {known}"
        return [line(""), *(line((each, "strong")) for each in wrap(told, width, indent="  "))]
    shares = {name: value / sum(spent.values()) for name, value in spent.items()}
    share = f"{'at most ' if view.goodput_at_most else ''}{ratio(view.goodput_ratio)}"
    head = f"goodput {share}: of {took(total)}, {seconds(spent.get('productive', 0.0))} productive"
    unknown = "lost work is not known: name the directory of the program's checkpoints with --checkpoint-dir"
    return [
        line(""),
        line((head, "strong")),
        *(line(each) for each in wrap(unknown, width) if view.goodput_at_most),
        shares_bar(shares, width, GOODPUT_LETTERS),
        legend(shares, width, GOODPUT_LETTERS),
    ]


def _watching(view: RunView, width: int) -> list[Line]:
    """Return lines on the sidecars: their overhead, and what could not be measured."""
    lines: list[Line] = []
    for node in view.nodes:
        if node.sidecar_cpu_seconds is None and node.sidecar_rss_bytes is None:
            continue
        late = f", {count(node.late_refreshes)} looks too late" if node.late_refreshes else ""
        host = f" ({plain(node.host)})" if node.host else ""
        told = f"node {node.node}{host}: sidecar {seconds(node.sidecar_cpu_seconds)} of CPU, "
        lines.append(clip(line((told + size(node.sidecar_rss_bytes) + late, "dim")), width))
    for collector in view.collectors:
        if not collector.available:
            where = f" on node {collector.node}" if len(view.nodes) > 1 else ""
            told = f"not measured{where}: {plain(collector.name)}: {plain(collector.reason) or UNKNOWN}"
            lines += [line((each, "dim")) for each in wrap(told, width, indent="  ")]
    return lines
