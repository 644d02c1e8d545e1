"""Sections on attempts, failures and restarts, and on the goodput of the whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from gpulaunch.exporters.report.document import Block, Chart, Column, Facts, Paragraph, Section, Series, Span, Table
from gpulaunch.exporters.report.formatting import moment, percent, seconds, words
from gpulaunch.exporters.report.time_axis import clock_of, over_time
from gpulaunch.exporters.view.figures import UNKNOWN
from gpulaunch.exporters.view.model import AttemptView, RunView, Status

_MOST_EVENTS: Final = 120
_MOST_ATTEMPTS: Final = 60
_LONGEST_FIELDS: Final = 240
_EMPTY: Final[tuple[object, ...]] = (None, "", {}, [])
_COLOURS: Final = {
    Status.FINISHED: 2,
    Status.RUNNING: 0,
    Status.FAILED: 3,
    Status.STOPPED: 6,
    Status.LOST: 4,
    Status.UNKNOWN: 5,
}
_BUCKETS: Final = {
    "productive": "steps that were kept",
    "checkpoint_stall": "training blocked by checkpoint writes",
    "detection": "from a failure until its detection",
    "teardown": "ending the processes of an attempt",
    "restart": "restarting the ranks",
    "lost_work": "steps repeated after a restart",
    "startup": "from the command until the first step",
}


def failures(view: RunView) -> Section:
    """Return the section on attempts, their first causes, and the history."""
    blocks: list[Block] = []
    failed = [attempt for attempt in view.attempts if attempt.cause is not None]
    if view.restarts:
        kinds = ", ".join(f"{kind} {number}" for kind, number in view.restarts.items())
        blocks.append(Paragraph(f"Restarts by first cause: {kinds}."))
    elif view.attempts:
        blocks.append(Paragraph("No restart."))
    if view.hangs or view.hang_suspicions:
        blocks.append(Paragraph(f"Hangs acted on: {view.hangs}. Warnings of missing progress: {view.hang_suspicions}."))
    if view.status is Status.STOPPED:
        by = f"by {view.stopped_by}" if view.stopped_by else "as another node of it was"
        blocks.append(Paragraph(f"The job was told to end, {by}."))
    if view.preempted:
        blocks.append(Paragraph("The job was preempted."))
    if view.resumed_step is not None:
        blocks.append(Paragraph(f"The newest attempt resumed from step {view.resumed_step}."))
    if len(view.attempts) > _MOST_ATTEMPTS:
        blocks.append(Paragraph(f"The newest {_MOST_ATTEMPTS} of {len(view.attempts)} attempts are shown."))
    if (after_s := _after_first(view)) is not None:
        blocks.append(
            Paragraph(
                "This directory has earlier runs: times are relative to the start of the first, and this run started "
                f"{seconds(after_s)} after it."
            )
        )
    attempts = view.attempts[-_MOST_ATTEMPTS:]
    if attempts:
        blocks += [*_timeline(view, attempts), _attempts(view, attempts)]
    parts = [_cause(attempt) for attempt in failed[-_MOST_ATTEMPTS:]]
    if view.events:
        parts.append(Section(id="events", title="Events", blocks=(_events(view),)))
    return Section(
        id="failures",
        title="Failures and restarts",
        blocks=tuple(blocks) or (Paragraph("No attempt was recorded."),),
        parts=tuple(parts),
    )


def _after_first(view: RunView) -> float | None:
    """Return how long after the first run in the directory the newest began; None if it is the first."""
    began_s = view.began_s
    if began_s is None:
        return None
    begins = [attempt.began_s for attempt in view.attempts if attempt.began_s is not None]
    begins += [event.at_s for event in view.events if event.what == "run_started" and not event.node]
    return began_s - clock_of(view).zero_s if min(begins, default=began_s) < began_s else None


def _until(view: RunView, attempts: Sequence[AttemptView]) -> float | None:
    """Return when the first of these attempts ended; if not recorded, when the next one began."""
    first, *later = attempts
    if first.ended_s is not None:
        return first.ended_s
    moments = [attempt.began_s for attempt in later]
    moments += [view.ended_s if view.ended_s is not None else view.seen_s]
    if first.began_s is not None and view.began_s is not None and first.began_s < view.began_s:
        moments.append(view.began_s)
    return min((moment for moment in moments if moment is not None), default=None)


def _timeline(view: RunView, attempts: tuple[AttemptView, ...]) -> list[Block]:
    clock = clock_of(view)
    spans: list[Span] = []
    for place, attempt in enumerate(attempts):
        end_s = _until(view, attempts[place:])
        if attempt.began_s is None or end_s is None:
            continue
        told = attempt.ended_s is not None or end_s in (view.ended_s, view.seen_s)
        length = f" after {seconds(max(0.0, end_s - attempt.began_s))}" if told else ", end time unknown"
        spans.append(
            Span(
                label=attempt.name,
                begin=clock.of(attempt.began_s),
                end=max(clock.of(attempt.began_s), clock.of(end_s)),
                text=f"{attempt.status.value}{length}",
                colour=_COLOURS[attempt.status],
            )
        )
    if not spans:
        return []
    return [
        Chart(
            id="attempts",
            title="Timeline of attempts",
            kind="spans",
            unit=clock.unit,
            summary="The table below has the same values.",
            time_unit=clock.unit,
            spans=tuple(spans),
        )
    ]


def _attempts(view: RunView, attempts: tuple[AttemptView, ...]) -> Table:
    zero_s = clock_of(view).zero_s
    rows: list[tuple[str, ...]] = []
    for attempt in attempts:
        began_s, ended_s = attempt.began_s, attempt.ended_s
        rows.append(
            (
                f"{attempt.name} (earlier run)" if attempt.earlier else str(attempt.number),
                seconds(None if began_s is None else began_s - zero_s),
                seconds(None if began_s is None or ended_s is None else ended_s - began_s),
                attempt.status.value,
                attempt.cause.kind if attempt.cause is not None else UNKNOWN,
                attempt.cause.headline if attempt.cause is not None else UNKNOWN,
                moment(began_s),
            )
        )
    return Table(
        caption="Attempts: start, duration and first cause of failure",
        columns=(
            Column("Attempt"),
            Column("Started after", number=True),
            Column("Duration", number=True),
            Column("Status"),
            Column("Kind"),
            Column("First cause"),
            Column("Started at"),
        ),
        rows=tuple(rows),
    )


def _cause(attempt: AttemptView) -> Section:
    cause = attempt.cause
    assert cause is not None, "only attempts that have one"
    pairs = (
        ("failure", cause.headline),
        ("kind", cause.kind),
        ("rank", str(cause.rank) if cause.rank is not None else ""),
        ("why it is the first cause", cause.why),
        ("what to do", cause.advice),
        ("failure report", cause.report),
    )
    return Section(
        id=f"attempt-{attempt.place}",
        title=f"Why {attempt.name} failed",
        blocks=(Facts(f"First cause of {attempt.name}", tuple(pair for pair in pairs if pair[1])),),
    )


def _events(view: RunView) -> Table:
    zero_s = clock_of(view).zero_s
    shown = view.events[: -_MOST_EVENTS - 1 : -1]
    more = f" (the newest {len(shown)} of {len(view.events)})" if len(shown) < len(view.events) else ""
    return Table(
        caption=f"Events, newest first{more}",
        columns=(Column("After", number=True), Column("Event"), Column("Node", number=True), Column("Details")),
        rows=tuple(
            (seconds(event.at_s - zero_s), words(event.what), str(event.node), _fields(event.fields)) for event in shown
        ),
    )


def _fields(fields: Mapping[str, Any]) -> str:
    told = _details(fields)
    return told if len(told) <= _LONGEST_FIELDS else told[: _LONGEST_FIELDS - 3] + "..."


def _details(value: object) -> str:
    """Format a field's value; in a mapping, True is just its name, and False and empty values are omitted."""
    if isinstance(value, Mapping):
        named = cast("Mapping[str, object]", value)
        held = {words(name): each for name, each in named.items() if each is not False and each not in _EMPTY}
        return ", ".join(name if each is True else f"{name} {_details(each)}".rstrip() for name, each in held.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(_details, cast("Sequence[object]", value)))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def goodput(view: RunView) -> Section:
    """Return the section on where the time of the run went."""
    used = [(bucket, spent) for bucket, spent in view.goodput_seconds.items() if spent is not None and spent > 0]
    whole = view.goodput_whole_seconds
    if not used:
        said = "It is unknown how the time of the run was spent."
        return Section(id="goodput", title="Goodput", blocks=(Paragraph(said),))
    if view.goodput_ratio is None:
        said = "No step was observed: the productive time is unknown. Startup and restarts end when the ranks run."
        return Section(id="goodput", title="Goodput", blocks=(Paragraph(said), _table(view, whole)))
    blocks: list[Block] = [
        Paragraph(_counted(view, whole)),
        Chart(
            id="goodput-shares",
            title="Time of the run",
            kind="bars",
            unit="%",
            summary="; ".join(f"{words(bucket)} {percent(value / whole)}" for bucket, value in used) + ".",
            labels=("run",),
            series=tuple(
                Series(name=words(bucket), values=(100 * value / whole,), colour=index)
                for index, (bucket, value) in enumerate(view.goodput_seconds.items())
                if value is not None and value > 0
            ),
        ),
        _table(view, whole),
    ]
    if any(value is not None for value in view.goodput_ratio_over_time):
        blocks += over_time(
            view,
            "goodput-over-time",
            "Goodput since the start",
            "%",
            f"{percent(view.goodput_ratio)} at the end.",
            [Series(name="goodput", values=view.goodput_ratio_over_time, colour=2)],
            factor=100.0,
        )
    if view.ended_s is not None:
        blocks.append(Paragraph(f"From {moment(view.began_s)} to {moment(view.ended_s)}."))
    return Section(id="goodput", title="Goodput", blocks=tuple(blocks))


def _counted(view: RunView, whole: float) -> str:
    told = f"{percent(view.goodput_ratio)} of {seconds(whole)} was spent on steps that were kept."
    if not view.goodput_at_most:
        return told
    return (
        f"At most {told} It is unknown which steps were repeated after a restart: the program resumed on its own. Name "
        "the directory of its checkpoints with --checkpoint-dir."
    )


def _table(view: RunView, whole: float) -> Table:
    return Table(
        caption="Time of the run",
        columns=(Column("Part"), Column("Time", number=True), Column("Share", number=True), Column("Meaning")),
        rows=tuple(
            (
                words(bucket),
                seconds(value),
                percent(None if value is None else value / whole),
                _BUCKETS.get(bucket, UNKNOWN),
            )
            for bucket, value in view.goodput_seconds.items()
        ),
    )
