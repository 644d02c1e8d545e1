"""Merges findings from findings.jsonl and telemetry, of the newest run in a directory and before it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from gpulaunch.exporters.store.reading import FindingRow
from gpulaunch.exporters.view.attempts import AttemptHistory
from gpulaunch.exporters.view.model import FindingView
from gpulaunch.exporters.view.nodes import finding_of
from gpulaunch.exporters.view.source import NodeSource
from gpulaunch.profiler.record import order_of

MOST_FINDINGS: Final = 200


def not_profiled(*, requested: bool) -> str:
    """Say why nothing is known; `requested`: profiling was."""
    return "this run was not profiled" + ("" if requested else " (--no-profile)")


def findings_of(
    in_file: Sequence[FindingView], sources: Sequence[NodeSource], history: AttemptHistory
) -> tuple[FindingView, ...]:
    """Return the findings of findings.jsonl, with the cost of each from the telemetry.

    Neither records that a finding ends with the run: one that was active then was active to the end. A finding last
    seen before the newest run began belongs to an earlier run in the same directory, and so does its cost.
    """
    found: dict[tuple[Any, ...], FindingView] = {}
    for told in in_file:
        began_s = _began(history, next((source for source in sources if source.node == told.node), None))
        found[_key(told)] = replace(told, earlier=told.last_seen_s < began_s)
    for source in sources:
        began_s = _began(history, source)
        for row in source.findings:
            earlier = not _is_of_newest(row, source, history)
            view = finding_of(
                row.told,
                node=source.node,
                active=row.active,
                first_seen_s=row.first_seen_s,
                last_seen_s=row.last_seen_s,
                lost_seconds=None if earlier else row.lost_seconds,
            )
            view = replace(view, earlier=earlier)
            known = found.get(_key(view))
            found[_key(view)] = view if known is None else _joined(known, view, began_s)
    views = [replace(each, active=each.active and not each.earlier) for each in found.values()]
    ordered = sorted(
        views,
        key=lambda finding: (
            *(not finding.active, finding.earlier),
            *order_of(finding.evidence, finding.seconds_per_hour),
            *(finding.rule, finding.node),
        ),
    )
    return tuple(ordered[:MOST_FINDINGS])


def _began(history: AttemptHistory, source: NodeSource | None) -> float:
    """Return when the newest run began, as far as recorded."""
    if history.began_s is not None:
        return history.began_s
    return source.run.began_s if source is not None and source.run is not None else 0.0


def _is_of_newest(row: FindingRow, source: NodeSource, history: AttemptHistory) -> bool:
    """Whether a stored finding is of the newest run. Nodes other than the first have their own run ids."""
    since = row.last_seen_s >= (history.began_s or 0.0)
    if source.run is None:
        return since
    newest = row.run == source.run.id
    return newest and (since if source.node else history.run_id in ("", source.run.run_id))


def _joined(one: FindingView, other: FindingView, began_s: float) -> FindingView:
    """Merge two records of one finding; a record of an earlier run is ignored."""
    if one.earlier != other.earlier:
        return other if one.earlier else one
    newer = other if other.last_seen_s > one.last_seen_s else one
    firsts = [each.first_seen_s for each in (one, other)]
    lost = [each.lost_seconds for each in (one, other) if each.lost_seconds is not None]
    return replace(
        newer,
        # findings.jsonl keeps the findings of an earlier run.
        first_seen_s=min([first for first in firsts if first >= began_s] or firsts),
        lost_seconds=lost[0] if lost else None,
    )


def _key(finding: FindingView) -> tuple[Any, ...]:
    return finding.node, finding.rule, finding.file, finding.line, finding.subject
