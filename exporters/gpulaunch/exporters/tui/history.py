"""The history page: attempts and their failures, where the time went, events, and what is unknown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from gpulaunch.exporters.tui.charts import GOODPUT, Bar, Line, legend
from gpulaunch.exporters.tui.summary import STATUS_STYLES, restarts
from gpulaunch.exporters.tui.text import pairs, place, plain, ratio, seconds, size, took
from gpulaunch.exporters.view.figures import UNKNOWN, count
from gpulaunch.exporters.view.model import AttemptView, RunView


def history(view: RunView, *, most_events: int = 500) -> Group:
    """Return the page: attempts, newest first; then where the time of the run went; then events, newest first."""
    return Group(
        *(each for at in reversed(range(len(view.attempts))) for each in _attempt(view, view.attempts[at:])),
        *_goodput(view),
        *_counts(view),
        *_watching(view),
        *_events(view, most_events),
    )


def since(view: RunView, at_s: float | None) -> str:
    """Return a timestamp as time since the run began."""
    if at_s is None or view.began_s is None:
        return UNKNOWN
    passed_s = at_s - view.began_s  # negative: from an earlier run in the same directory
    return f"{'+' if passed_s >= 0 else '-'}{took(abs(passed_s))}"


def _attempt(view: RunView, attempts: Sequence[AttemptView]) -> Iterator[RenderableType]:
    """Yield the lines of the first of these attempts; the others came later."""
    attempt = attempts[0]
    name = f"{attempt.name} (earlier run)" if attempt.earlier else attempt.name
    head = f"{name}: {attempt.status.value} {since(view, attempt.began_s)}{_lasted(view, attempts)}"
    yield Text(head, STATUS_STYLES[attempt.status])
    if (cause := attempt.cause) is not None:
        lines = [Text(f"{plain(cause.kind)}: {plain(cause.headline)}", "bold")]
        lines += [Text(plain(text)) for text in (cause.why, cause.advice) if text]
        lines += [Text(f"report: {plain(cause.report)}", "dim")] if cause.report else []
        yield Padding(Group(*lines), (0, 0, 0, 3))


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


def _goodput(view: RunView) -> Iterator[RenderableType]:
    spent = {name: value for name, value in view.goodput_seconds.items() if value is not None and value > 0}
    if not spent:
        return
    yield Text()
    if view.goodput_ratio is None:
        known = ", ".join(f"{plain(name.replace('_', ' '))} {seconds(value)}" for name, value in spent.items())
        yield Text(f"goodput unknown, no steps were observed; of {took(view.elapsed_seconds)}: {known}", "bold")
        return
    share = f"{'at most ' if view.goodput_at_most else ''}{ratio(view.goodput_ratio)}"
    whole, productive = took(view.goodput_whole_seconds), seconds(spent.get("productive", 0.0))
    yield Text(f"goodput {share}: of {whole}, {productive} productive", "bold")
    if view.goodput_at_most:
        yield Text("lost work is unknown: specify the directory of the program's checkpoints with --checkpoint-dir")
    shares = {name: value / sum(spent.values()) for name, value in spent.items()}
    yield Bar(shares, GOODPUT)
    yield legend(shares, GOODPUT)


def _counts(view: RunView) -> Iterator[RenderableType]:
    told = [restarts(view), f"{count(view.hangs)} hang{'' if view.hangs == 1 else 's'}"]
    told += [f"{count(view.hang_suspicions)} standstill{'' if view.hang_suspicions == 1 else 's'} told"]
    told += ["preempted"] if view.preempted else []
    told += [f"resumed from step {count(view.resumed_step)}"] if view.resumed_step is not None else []
    yield Text("; ".join(told))
    yield from (Text(f"note: {plain(note)}", "yellow") for note in view.notes)


def _watching(view: RunView) -> Iterator[RenderableType]:
    """Yield lines on the sidecars: their overhead, and what could not be measured."""
    for node in view.nodes:
        if node.sidecar_cpu_seconds is None and node.sidecar_rss_bytes is None:
            continue
        late = f", {count(node.late_refreshes)} looks too late" if node.late_refreshes else ""
        cost = f"sidecar {seconds(node.sidecar_cpu_seconds)} of CPU, {size(node.sidecar_rss_bytes)}"
        yield Text(f"{place(node.node, node.host)}: {cost}{late}", "dim")
    for collector in view.collectors:
        if not collector.available:
            where = f" on node {collector.node}" if len(view.nodes) > 1 else ""
            yield Text(f"not measured{where}: {plain(collector.name)}: {plain(collector.reason) or UNKNOWN}", "dim")


def _events(view: RunView, most: int) -> Iterator[RenderableType]:
    if view.events:
        yield Text("\nEVENTS", "bold underline")
    for event in list(reversed(view.events))[:most]:
        node = f" n{event.node}" if event.node else ""
        yield Line(f"{since(view, event.at_s):>9}{node} {plain(event.what)} {pairs(event.fields)}")
    if len(view.events) > most:
        yield Text(f"          ... and {len(view.events) - most} more", "dim")
