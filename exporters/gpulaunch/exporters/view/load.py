"""Loads the view of a run from its directory, during or after the run, complete or not."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any, Final

from gpulaunch.exporters.files.findings import FINDINGS_FILE, read_findings
from gpulaunch.exporters.files.tuned import tried_in
from gpulaunch.exporters.store.locations import files_of, nodes_of
from gpulaunch.exporters.view.assemble import Parts, assemble, events_of
from gpulaunch.exporters.view.attempts import AttemptHistory, history_of
from gpulaunch.exporters.view.files import RunFiles, holds, read_files
from gpulaunch.exporters.view.model import FindingView, RunView, Status
from gpulaunch.exporters.view.nodes import finding_of
from gpulaunch.exporters.view.source import NodeSource, read_source
from gpulaunch.profiler.kernel import kernel

_FRESH_S: Final = 30.0
"""A run with anything newer than this is running, wherever its launcher is."""
_MOST_NODES: Final = 1024
"""Beside the first."""
_CLOCKS_S: Final = 5.0
"""Clocks of two nodes rarely differ by more than this."""


def load_run(
    run_dir: str | Path, *, max_points: int = 180, window_s: float | None = None, now_s: float | None = None
) -> RunView:
    """Return the view of a run.

    Never raises for the content of the directory: missing or damaged files are listed in the view's notes.

    Args:
        run_dir: the run directory; with several nodes, that of the first.
        max_points: limit per curve.
        window_s: limit curves to this many last seconds; None: the whole run.
        now_s: the current time (Unix seconds); None: read the clock.
    """
    parts = gather(Path(run_dir), now_s=time.time() if now_s is None else now_s)
    try:
        return assemble(parts, max_points=max_points, window_s=window_s)
    finally:
        for source in parts.sources:
            source.close()


def gather(run_dir: Path, *, now_s: float, live: bool = False) -> Parts:
    """Read everything; the caller closes the sources. `live`: for a sidecar of the run, which then counts as running
    until its end is recorded."""
    others = [(node, path) for node, path in nodes_of(run_dir) if node]
    nodes = {node: read_files(path) for node, path in [(0, run_dir), *others[:_MOST_NODES]]}
    lead = 0 if live else _lead(nodes)
    files = nodes[lead]
    places = files_of(run_dir)
    sources = [read_source(path, node) for node, path in places]
    of_lead = next((source for (node, _), source in zip(places, sources, strict=True) if node == lead), None)
    history = history_of(files.events, files.group, files.attempts)
    files.summary = _summary_of(files, history, of_lead)
    notes: list[str] = []
    if not sources and files.job and not live:  # if live, a collector reports why there is none yet
        notes.append("telemetry.sqlite is missing: nothing is known over time (--no-profile, or an older gpulaunch)")
    for source in sources:
        (_only_of if source is of_lead else _only_joined)(source, history, notes)
    events = [event for node, each in nodes.items() if node != lead for event in events_of(each, node)]
    status = _status(files, history, sources, now_s, live=live)
    if status is Status.LOST:
        notes.append("the launcher of this run is gone and has not said how it ended: killed, or its node went down")
    if status is Status.UNKNOWN and history.began_s is not None:
        where = history.host or "an unknown host"
        if where == socket.gethostname():
            where += " (in another container, of another user, or of before it was booted)"
        notes.append(
            f"whether this run goes on cannot be seen from here: its launcher is on {where}, "
            "nobody watches it, and it has said nothing for a while"
        )
    return Parts(
        run_dir=run_dir,
        files=files,
        history=history,
        status=status,
        now_s=now_s,
        sources=sources,
        findings=[
            finding
            for node, each in nodes.items()
            # The directory of another node than the first may be looked at alone.
            for finding in _findings(each.run_dir, node or (sources[0].node if sources else 0), notes)
        ],
        other_events=events,
        live=live,
        tried=tried_in(run_dir, notes),
        notes=notes,
    )


def _only_of(source: NodeSource, history: AttemptHistory, notes: list[str]) -> None:
    """Drop totals of another launcher run in the same directory."""
    if source.run is None or not history.run_id or source.run.run_id == history.run_id:
        return
    _empty(source)
    notes.append(f"telemetry.sqlite has nothing of the newest run in this directory ({history.run_id}) yet")


def _only_joined(source: NodeSource, history: AttemptHistory, notes: list[str]) -> None:
    """Drop totals of a further node that is not, or not yet, in the newest run.

    Such a node has its own run ids and its own clock. It is in the newest run if it began with that run or later; or,
    if its clock is far behind, once it is seen after the run began.
    """
    if source.run is None or history.began_s is None:
        return
    begins, seen_s = source.run.began_s >= history.began_s - _CLOCKS_S, source.seen_s or 0.0
    if begins or seen_s >= history.began_s + _CLOCKS_S:
        return
    _empty(source)
    source.run = None
    notes.append(f"node {source.node} is not in the newest run in this directory, or not yet: what it has is older")


def _empty(source: NodeSource) -> None:
    """Clear the values of a source. Findings and their times stay: they identify their own run."""
    source.document, source.counters, source.gauges = {}, {}, {}
    source.recent, source.seen_s = None, None


def _summary_of(files: RunFiles, history: AttemptHistory, source: NodeSource | None) -> dict[str, Any]:
    """Return the summary of the newest run: the file is written at the end of a run, and stays during the next."""
    run_id = files.summary.get("run_id")
    if not isinstance(run_id, str):  # from an older gpulaunch: a finished run has written its own
        return files.summary if history.ended_s is not None or history.began_s is None else {}
    of_source = source.run.run_id if source is not None and source.run is not None else ""
    return files.summary if run_id == (history.run_id or of_source or run_id) else {}


def _status(files: RunFiles, history: AttemptHistory, sources: list[NodeSource], now_s: float, *, live: bool) -> Status:
    """Return the run's status: as recorded, else by whether its launcher is alive, else by recent data."""
    if history.ended_s is not None:
        return history.status
    if live:
        return Status.RUNNING
    if history.began_s is None:
        code = files.summary.get("exit_code")
        if isinstance(code, int):
            return Status.FINISHED if code == 0 else Status.FAILED
        if not files.group and not sources:
            return Status.UNKNOWN
    seen_s = [source.seen_s for source in sources if source.seen_s is not None]
    seen_s += [files.touched_s] if files.touched_s is not None else []
    fresh = bool(seen_s) and now_s - max(seen_s) <= _FRESH_S
    runs = [source.run for source in sources if source.run is not None]
    host = history.host or next((run.host for run in runs if history.run_id in ("", run.run_id)), "")
    here = _is_here(history, host)
    pid = history.pid if history.pid is not None else files.group.get("agent_pid")
    held = None if here is False else holds(pid, files.run_dir)
    # A missing process here says nothing about another host; nor does missing data where no sidecar writes any.
    gone = held is False and here
    if held or (fresh and not gone):
        return Status.RUNNING
    gone = gone or _was_booted_anew(history)
    return Status.LOST if gone or any(source.seen_s is not None for source in sources) else Status.UNKNOWN


def _is_here(history: AttemptHistory, host: str) -> bool | None:
    """Whether the launcher's pid is valid on this host; None: unknown."""
    ours = kernel()
    if ours and history.kernel:
        return history.kernel == ours
    return host == socket.gethostname() if host else None


def _was_booted_anew(history: AttemptHistory) -> bool:
    """Whether this is the launcher's host, by name, but another boot of it."""
    boots = [each.partition(" ")[0] for each in (kernel(), history.kernel)]
    return all(boots) and boots[0] != boots[1] and history.host == socket.gethostname()


def _lead(nodes: dict[int, RunFiles]) -> int:
    """The node whose history is that of the run: the first, but of a job that goes on without a lost node one that took
    part in the newest group."""
    starts = {node: each for node, files in nodes.items() if (each := _last_start(files)) is not None}
    newest = max(starts.values(), key=lambda start: start["time_s"], default=None)
    if newest is None or _begun_s(nodes[0]) > newest["time_s"]:  # a newer run, of one node for instance
        return 0
    of_job = [node for node, start in starts.items() if start["job"] == newest["job"]]
    return max(of_job, key=lambda node: (starts[node]["generation"], _has_ended(nodes[node]), -node))


def _last_start(files: RunFiles) -> dict[str, Any] | None:
    """The last start of ranks, of a job of several nodes that share a plan."""
    last = next((line for line in reversed(files.events) if line["event"] == "started"), None)
    known = last is not None and isinstance(last.get("job"), str) and isinstance(last.get("generation"), int)
    return last if known else None


def _begun_s(files: RunFiles) -> float:
    return max((line["time_s"] for line in files.events if line["event"] in ("run_started", "started")), default=0.0)


def _has_ended(files: RunFiles) -> bool:
    return bool(files.events) and files.events[-1]["event"] == "run_ended"


def _findings(run_dir: Path, node: int, notes: list[str]) -> list[FindingView]:
    return [
        finding_of(
            told,
            node=node,
            active=told["active"],
            first_seen_s=told["first_seen_s"],
            last_seen_s=told["last_seen_s"],
            lost_seconds=None,
        )
        for told in read_findings(run_dir / FINDINGS_FILE, notes)
    ]
