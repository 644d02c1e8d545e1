"""Assembles a view from what was read: files of the run directory, sources of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from gpulaunch.exporters.store.bounded import bounded
from gpulaunch.exporters.store.reading import RunRow
from gpulaunch.exporters.store.run_events import OF_ITS_HOST
from gpulaunch.exporters.view.attempts import AttemptHistory
from gpulaunch.exporters.view.curves import Curves
from gpulaunch.exporters.view.files import RunFiles
from gpulaunch.exporters.view.findings import findings_of
from gpulaunch.exporters.view.finished import settled
from gpulaunch.exporters.view.goodput import goodput_of, is_profiled
from gpulaunch.exporters.view.model import EventView, FindingView, RunView, Status, whole_of
from gpulaunch.exporters.view.nodes import collectors_of, devices_of, node_of, sites_of
from gpulaunch.exporters.view.rank_model import RankView
from gpulaunch.exporters.view.ranks import ranks_of, with_summary
from gpulaunch.exporters.view.run_curves import ranks_with_curves, run_axis, with_curves
from gpulaunch.exporters.view.source import NodeSource, part
from gpulaunch.exporters.view.values import Values, whole
from gpulaunch.profiler.channel.layout import PHASES
from gpulaunch.profiler.redact import redact_words

MOST_EVENTS: Final = 500
_EDGES: Final = frozenset(("dataloader", "backward", "optimizer"))
_MOST_FAULTS: Final = 3
_NO_FIELDS: Final = frozenset(("version", "event", "time_s", *OF_ITS_HOST))
"""Fields of an events.jsonl line that are stored elsewhere, or mean nothing to a reader."""


@dataclass(kw_only=True)
class Parts:
    """Everything that was read."""

    run_dir: Path
    files: RunFiles
    history: AttemptHistory
    status: Status
    now_s: float
    sources: list[NodeSource]
    findings: list[FindingView]
    """From findings.jsonl."""
    other_events: list[EventView] = field(default_factory=list[EventView])
    """From other nodes."""
    live: bool = False
    tried: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list[str])


def assemble(parts: Parts, *, max_points: int, window_s: float | None) -> RunView:
    """Return the view, with the curves of its nodes."""
    sources = parts.sources
    num_ranks = sum(len(part(source.document, "ranks")) for source in sources)
    axis = run_axis(sources, num_ranks, max_points, window_s, parts.history.began_s)
    curves = [source.curves(axis, peaks=not parts.live and window_s is None) for source in sources]
    chosen = ranks_with_curves(sources, num_ranks)
    ranks = _ranks(sources, curves, chosen)
    ranks = with_summary(ranks, parts.files.summary, profiled=is_profiled(parts.files))
    view = _recorded(parts, ranks)
    view = _with_goodput(view, parts)
    view = _with_present(view, sources)
    view = _with_nodes(view, sources, curves)
    if axis is not None:
        view = with_curves(view, axis, sources, curves, chosen)
    return settled(replace(view, tried=parts.tried, notes=_notes(parts, ranks, chosen, num_ranks)))


def _recorded(parts: Parts, ranks: Sequence[RankView]) -> RunView:
    """Return what is known of the run as a whole: which one it is, how it goes or ended, its attempts, its steps."""
    files, history, sources = parts.files, parts.history, parts.sources
    first = _first(sources)
    run = first.run if first is not None else None
    watched = parts.live or run is not None
    counters, gauges = _counters(sources), Values(first.gauges if first is not None else {})
    attempts = history.views({**(first.failures if first is not None else {}), **files.causes}, parts.status)
    moments = [*(source.seen_s for source in sources), files.touched_s]
    resumed_steps = (whole(history.ending.get("resumed_step")), history.resumed_step, _highest(sources, _RESUMED))
    resumed_step = next((step for step in resumed_steps if step is not None), None)
    checkpoints = (whole(history.ending.get("checkpoint_step")), resumed_step, _highest(sources, _CHECKPOINT))
    command = files.job.get("command")
    error = files.summary.get("error")
    return RunView(
        run_dir=str(parts.run_dir),
        name=_name(parts, run),
        run_id=history.run_id or (run.run_id if run is not None else ""),
        command=redact_words(map(str, command)) if isinstance(command, list) else (),
        status=parts.status,
        phase=history.phase,
        live=parts.live,
        made_s=parts.now_s,
        seen_s=max((moment for moment in moments if moment is not None), default=None),
        began_s=history.began_s,
        ended_s=history.ended_s,
        elapsed_seconds=_elapsed(parts),
        exit_code=history.exit_code,
        stopped_by=history.stopped_by,
        error=error if isinstance(error, str) and parts.status in (Status.FAILED, Status.STOPPED) else "",
        world_size=_world_size(parts, run, ranks),
        num_nodes=whole(files.job.get("nnodes")) or (len(sources) or None),
        attempts=attempts,
        attempt=attempts[-1].number if attempts and not attempts[-1].earlier else None,
        restarts=_restarts(history, counters),
        hang_suspicions=max(history.hang_suspicions, counters.count("hang_suspicions_total")),
        hangs=max(history.hangs, counters.count("hangs_total")),
        stall=history.stall if parts.status is Status.RUNNING else None,
        preempted=history.preempted or bool(gauges.get("preempted")),
        steps=max(
            (rank.steps for rank in ranks if rank.steps is not None),
            default=0 if watched and not ranks else None,
        ),
        checkpoint_step=max((step for step in checkpoints if step is not None), default=None),
        resumed_step=resumed_step,
        ranks=tuple(ranks),
        findings=findings_of(parts.findings, sources, history),
        events=_events(parts),
        watched=watched,
        profiled=is_profiled(files),
    )


def _with_goodput(view: RunView, parts: Parts) -> RunView:
    goodput = goodput_of(parts.files, parts.history, parts.sources, _counters(parts.sources))
    productive_s, spent_s = goodput.get("productive"), whole_of(goodput, view.elapsed_seconds)
    return replace(
        view,
        goodput_seconds=goodput,
        goodput_ratio=productive_s / spent_s if productive_s is not None and spent_s > 0 else None,
    )


def _with_present(view: RunView, sources: Sequence[NodeSource]) -> RunView:
    """Add every `_now` value: what the newest rows say."""
    rates = [rank.steps_per_second_now for rank in view.ranks if rank.steps_per_second_now is not None]
    lengths = [rank.step_seconds_now for rank in view.ranks if rank.step_seconds_now is not None]
    recent = [source.recent for source in sources if source.recent is not None]
    return replace(
        view,
        steps_per_second_now=min(rates, default=None),
        samples_per_second_now=_samples_now(sources),
        step_seconds_now=sum(lengths) / len(lengths) if lengths else None,
        phase_ratios_now=_mean_ratios(view.ranks),
        recent_seconds=max((now.at_s - before.at_s for before, now in recent), default=0.0),
    )


def _with_nodes(view: RunView, sources: Sequence[NodeSource], curves: Sequence[Curves]) -> RunView:
    """Add what belongs to the nodes, and not to a rank."""
    pairs = list(zip(sources, curves, strict=True))
    return replace(
        view,
        devices=tuple(device for source, own in pairs for device in devices_of(source, own)),
        nodes=tuple(node_of(source, own) for source, own in pairs if source.run is not None),
        collectors=tuple(collector for source in sources for collector in collectors_of(source)),
        sites=sites_of(sources),
    )


def _notes(parts: Parts, ranks: Sequence[RankView], chosen: set[int] | None, num_ranks: int) -> tuple[str, ...]:
    """Return what is missing or damaged; each note of a node once."""
    notes = list(parts.notes)
    if chosen is not None:
        notes.append(f"curves of {len(chosen)} of {num_ranks} ranks only; all have their totals")
    notes += _unseen(ranks)
    for source in parts.sources:
        notes += [note for note in source.notes if note not in notes]
    return (*parts.files.notes, *notes)


def _first(sources: Sequence[NodeSource]) -> NodeSource | None:
    """Return the source that the values of the whole run are read from."""
    return next((source for source in sources if source.run is not None), None)


def _counters(sources: Sequence[NodeSource]) -> Values:
    first = _first(sources)
    return Values(first.counters if first is not None else {})


_CHECKPOINT: Final = "gpulaunch_checkpoint_step"
_RESUMED: Final = "gpulaunch_resumed_step"


def _highest(sources: Sequence[NodeSource], name: str) -> int | None:
    told = (value for source in sources for key, value in source.gauges.items() if key[0] == name)
    return max(map(round, told), default=None)


def _ranks(sources: Sequence[NodeSource], curves: Sequence[Curves], chosen: set[int] | None) -> list[RankView]:
    ranks = {
        view.rank: view
        for source, own in zip(sources, curves, strict=True)
        for view in ranks_of(source, own, with_curves=chosen)
    }
    return [ranks[rank] for rank in sorted(ranks)]


def _unseen(ranks: Sequence[RankView]) -> list[str]:
    """Return notes on unreliable phases, where a boundary of the steps is not seen."""
    of: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.cost is not None and rank.cost.fault and not _EDGES.isdisjoint(rank.cost.parts_unavailable):
            of.setdefault(rank.cost.fault, []).append(rank.rank)
    return [f"not all of a step is seen in {_named(found)}: {fault}" for fault, found in of.items()][:_MOST_FAULTS]


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks, rank {ranks[0]} for one"


def _samples_now(sources: Sequence[NodeSource]) -> float | None:
    """Return samples per second; None if no batch size was ever seen, as without a DataLoader."""
    rates: list[float] = []
    for source in sources:
        if source.recent is None:
            continue
        before, now = source.recent
        for key, value in now.counters.items():
            if key[0] == "gpulaunch_samples_total" and value and now.at_s > before.at_s:
                was = before.counters.get(key, 0.0)
                rates.append((value - was if value >= was else value) / (now.at_s - before.at_s))
    return sum(rates) if rates else None


def _mean_ratios(ranks: Sequence[RankView]) -> dict[str, float]:
    known = [rank.phase_ratios_now for rank in ranks if rank.phase_ratios_now]
    return {phase: sum(ratios[phase] for ratios in known) / len(known) for phase in PHASES} if known else {}


def _restarts(history: AttemptHistory, counters: Values) -> dict[str, int]:
    said = part(history.ending, "restarts") or counters.one("restarts_total")
    return {kind: round(count) for kind, count in said.items() if isinstance(count, (int, float)) and count > 0}


def _elapsed(parts: Parts) -> float | None:
    """Return the duration of the run so far: the launcher's sum, else corrected for clock adjustments."""
    history, told = parts.history, parts.files.summary.get("elapsed_s")
    if isinstance(told, (int, float)):
        return max(0.0, float(told))
    if history.began_s is None:
        return None
    until_s, seen_s = history.ended_s, list[float]()
    if until_s is None and parts.status is Status.RUNNING:
        until_s = parts.now_s
    elif until_s is None:
        until_s = parts.files.touched_s
        seen_s = [source.seen_s for source in parts.sources if source.seen_s is not None]  # the rows' time never jumps
    moments = [*seen_s, *([] if until_s is None else [until_s - history.set_s])]
    return max(0.0, max(moments) - history.began_s) if moments else None


def _name(parts: Parts, run: RunRow | None) -> str:
    name = parts.files.job.get("name")
    if not (isinstance(name, str) and name):
        name = run.name if run is not None else ""
    return name or str(part(parts.files.job, "program").get("target", "")) or parts.run_dir.name


def _world_size(parts: Parts, run: RunRow | None, ranks: Sequence[RankView]) -> int | None:
    told = whole(parts.files.group.get("world_size"))
    if told is None and run is not None:
        told = run.world_size
    if told is None:
        nproc, nnodes = whole(parts.files.job.get("nproc")), whole(parts.files.job.get("nnodes"))
        told = nproc * nnodes if nproc is not None and nnodes is not None else None
    return told if told is not None else (len(ranks) or None)


def _events(parts: Parts) -> tuple[EventView, ...]:
    """Return the history, with findings that came and went; from telemetry alone if events.jsonl is empty."""
    events = [_event(line) for line in parts.files.events]
    for source in parts.sources:
        events += [
            EventView(at_s=at_s, what=what, fields=fields, node=source.node)
            for at_s, what, fields in source.events
            if what.startswith("finding_") or not parts.files.events
        ]
    events += parts.other_events
    events.sort(key=lambda event: event.at_s)
    return tuple(events[-MOST_EVENTS:])


def _event(line: Mapping[str, Any], node: int = 0) -> EventView:
    fields = {name: value for name, value in line.items() if name not in _NO_FIELDS}
    return EventView(at_s=float(line["time_s"]), what=str(line["event"]), fields=bounded(fields), node=node)


def events_of(files: RunFiles, node: int) -> list[EventView]:
    """Return the history of another node."""
    return [_event(line, node) for line in files.events[-MOST_EVENTS:]]
