"""Builds the view in a running sidecar: the present from memory, the past from the run directory."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from gpulaunch.exporters.view.assemble import Parts, assemble
from gpulaunch.exporters.view.attempts import AttemptHistory
from gpulaunch.exporters.view.files import RunFiles
from gpulaunch.exporters.view.load import gather
from gpulaunch.exporters.view.model import FindingView, RunView, Status
from gpulaunch.exporters.view.nodes import finding_of
from gpulaunch.exporters.view.source import NodeSource, live_source
from gpulaunch.profiler.record import NodeState


def view_of_state(
    state: NodeState,
    *,
    run_dir: str | Path | None = None,
    earlier: NodeState | None = None,
    max_points: int = 180,
    window_s: float | None = None,
) -> RunView:
    """Return the view of a running run.

    Args:
        state: the newest state of the sidecar.
        run_dir: source of the rest: history, attempts, curves, other nodes; None: no rest.
        earlier: a state some seconds older: `now` values cover the time between the two. None: taken from the run
            directory.
        max_points: limit per curve.
        window_s: limit curves to this many last seconds; None: the whole run.
    """
    if run_dir is not None:
        parts = gather(Path(run_dir), now_s=time.time(), live=True)
    else:
        files = RunFiles(run_dir=Path())
        parts = Parts(
            run_dir=Path(),
            files=files,
            history=AttemptHistory(),
            status=Status.RUNNING,
            now_s=state.taken_wall_ns / 1e9,
            sources=[],
            findings=[],
            live=True,
        )
    try:
        node = state.group.node if state.group is not None else None
        kept = next((source for source in parts.sources if node is None or source.node == node), None)
        live = live_source(state, kept, earlier)
        others = [source for source in parts.sources if source is not kept]
        parts.sources = sorted([live, *others], key=lambda source: source.node)
        parts.findings = _standing(state, parts.findings, live)
        return assemble(parts, max_points=max_points, window_s=window_s)
    finally:
        for source in parts.sources:
            source.close()


def _standing(state: NodeState, told: list[FindingView], live: NodeSource) -> list[FindingView]:
    """Return the findings; those of this node are active only if the state has them."""
    at_s = state.taken_wall_ns / 1e9
    standing = {(found.rule, found.file, found.line, found.subject): found for found in state.findings}
    views: list[FindingView] = []
    for view in told:
        key = (view.rule, view.file, view.line, view.subject)
        if view.node != live.node:
            views.append(view)
            continue
        found = standing.pop(key, None)
        views.append(
            replace(view, active=False)
            if found is None
            else finding_of(
                found.as_json(),
                node=live.node,
                active=True,
                first_seen_s=view.first_seen_s,
                last_seen_s=at_s,
                lost_seconds=None,
            )
        )
    views += [
        finding_of(found.as_json(), node=live.node, active=True, first_seen_s=at_s, last_seen_s=at_s, lost_seconds=None)
        for found in standing.values()
    ]
    keys = {(found.rule, found.file, found.line, found.subject) for found in state.findings}
    for row in live.findings:
        named = (row.told.get("rule"), row.told.get("file"), row.told.get("line"), row.told.get("subject"))
        if row.active and named not in keys:
            live.findings[live.findings.index(row)] = replace(row, active=False)
    return views
