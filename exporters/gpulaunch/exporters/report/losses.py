"""Report section on losses: findings with their cost, and the time without training."""

from __future__ import annotations

from typing import Final

from gpulaunch.exporters.report.document import Block, Column, Facts, Items, Paragraph, Section, Table
from gpulaunch.exporters.report.formatting import measured, moment, percent, rank_list, seconds, words
from gpulaunch.exporters.view.figures import UNKNOWN
from gpulaunch.exporters.view.findings import not_profiled
from gpulaunch.exporters.view.model import FindingView, RunView, Status
from gpulaunch.profiler.analysis.rules import RULES

_MOST_IN_DETAIL: Final = 40
_LEAST_OF_A_RUN: Final = 0.01
"""Findings that cost less than this share of the run are in the table, not in the lead."""
_RULES: Final = {rule.id: rule for rule in RULES}


def headline(view: RunView) -> tuple[str, ...]:
    """Return the largest losses, one sentence each."""
    if view.status is Status.RUNNING:
        active = [finding for finding in view.findings if finding.active]
        priced = [each for each in active if each.seconds_per_hour > 0 or each.is_urgent]
    else:  # a rate per hour is irrelevant for a finished run
        worth = _LEAST_OF_A_RUN * (view.elapsed_seconds or 0.0)
        priced = [finding for finding in view.findings if finding.seconds_per_hour > 0 and not finding.earlier]
        priced = [finding for finding in priced if finding.lost_seconds is None or finding.lost_seconds >= worth]
        priced.sort(key=lambda finding: -(finding.lost_seconds or 0.0))
    price = _price if view.status is Status.RUNNING else _price_of_run
    said = [
        f"{found.rule}{_at(found)}: {f'{price(found)}. ' * bool(found.seconds_per_step)}{found.advice}"
        for found in priced[:3]
    ]
    spent = {bucket: value for bucket, value in view.goodput_seconds.items() if value is not None}
    idle = {bucket: lost for bucket, lost in spent.items() if bucket != "productive" and lost > 0}
    whole = view.goodput_whole_seconds
    if idle and whole > 0:
        bucket = max(idle, key=lambda each: idle[each])
        if idle[bucket] >= 0.05 * whole:
            said.append(
                f"{percent(idle[bucket] / whole)} of the run's time ({seconds(idle[bucket])}) was spent on "
                f"{words(bucket)} instead of training."
            )
    return tuple(said)


def _tried(view: RunView) -> list[Block]:
    """What `gpulaunch tune` has measured of this job."""
    return [Items(view.tried)] if view.tried else []


def section(view: RunView) -> Section:
    """Return the findings, largest loss first, each with what to change."""
    findings = view.findings
    if not findings:
        return Section(id="losses", title="Bottlenecks", blocks=(Paragraph(_nothing(view)), *_tried(view)))
    blocks: list[Block] = [
        Paragraph(
            "The time is what would be saved in every step, and in an hour of training. Confidence: 90 % is read from "
            "a clock or a counter, 70 % is derived from measurements, 40 % is a bound. Together those of a rank "
            "take no more than there is: the time of a lower one is what those above it leave. Fix the first one and "
            "run again."
        ),
        Table(
            caption="Findings, largest loss first",
            columns=(
                Column("Finding"),
                Column("Where", code=True),
                Column("Per step", number=True),
                Column("Per hour", number=True),
                Column("In this run", number=True),
                Column("Confidence", number=True),
                Column("Ranks"),
                Column("Active"),
            ),
            rows=tuple(
                (
                    found.rule,
                    _where(found) or UNKNOWN,
                    seconds(found.seconds_per_step) if found.seconds_per_step else "no time",
                    seconds(found.seconds_per_hour) if found.seconds_per_step else "no time",
                    _lost(found),
                    f"{found.confidence:.0%}",
                    rank_list(found.ranks) or UNKNOWN,
                    _stands(found, view),
                )
                for found in findings
            ),
        ),
    ]
    if len(findings) > _MOST_IN_DETAIL:
        blocks.append(Paragraph(f"Details of the first {_MOST_IN_DETAIL} of {len(findings)} follow."))
    return Section(
        id="losses",
        title="Bottlenecks",
        blocks=(*blocks, *_tried(view)),
        parts=tuple(_part(number, found, view) for number, found in enumerate(findings[:_MOST_IN_DETAIL], 1)),
    )


def _part(number: int, found: FindingView, view: RunView) -> Section:
    rule = _RULES.get(found.rule)
    blocks: list[Block] = []
    if rule is not None:
        blocks.append(Paragraph(rule.problem.replace("`", "")))
    blocks.append(
        Paragraph(
            f"Cost{' in an earlier run' if found.earlier else ''}: {_price(found)}."
            if found.seconds_per_step
            else "Cost: no time, or none yet."
        )
    )
    if found.advice:
        blocks.append(Paragraph(f"What to change: {found.advice}"))
    if rule is not None:
        blocks.append(Paragraph(f"In general: {rule.fix.replace('`', '')}"))
    pairs = [
        *measured(found.evidence),
        ("ranks", rank_list(found.ranks, 64) or UNKNOWN),
        ("confidence", f"{found.confidence:.0%}"),
        ("lost while active", _lost(found)),
        ("seen", f"{moment(found.first_seen_s)} to {moment(found.last_seen_s)}"),
    ]
    if view.num_nodes is not None and view.num_nodes > 1:
        pairs.append(("node", str(found.node)))
    blocks.append(Facts(f"Evidence of finding {number}, {found.rule}", tuple(pairs)))
    return Section(id=f"finding-{number}", title=f"{number}. {found.rule}{_at(found)}", blocks=tuple(blocks))


def _nothing(view: RunView) -> str:
    if not view.watched and not view.ranks:
        return f"{not_profiled(requested=view.profiled).capitalize()}: it is unknown where time was spent."
    if not view.watched:
        return "No finding was recorded. The totals of each rank are below."
    return (
        "No rule found a problem. The rules judge the steps after the first 10, at least 20 of them (4, if they take a "
        "minute), which a short run may not have. The time of a step is broken down below."
    )


def _lost(found: FindingView) -> str:
    return "no time" if found.earlier else seconds(found.lost_seconds)


def _stands(found: FindingView, view: RunView) -> str:
    if found.earlier:
        return "only in an earlier run"
    if not found.active:
        return "no"
    return "yes" if view.status is Status.RUNNING else "until the end"


def _where(found: FindingView) -> str:
    return " ".join(each for each in (found.location, f"({found.subject})" if found.subject else "") if each)


def _at(found: FindingView) -> str:
    where = _where(found)
    return f" at {where}" if where and found.file is not None else f" {where}" if where else ""


def _price_of_run(found: FindingView) -> str:
    each = f"{seconds(found.seconds_per_step)} of every step"
    return f"{seconds(found.lost_seconds)} of this run, {each}" if found.lost_seconds else _price(found)


def _price(found: FindingView) -> str:
    return f"{seconds(found.seconds_per_step)} of every step, {seconds(found.seconds_per_hour)} of every hour"
