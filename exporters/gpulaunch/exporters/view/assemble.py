"""Assembles a view from what was read: files of the run directory, sources of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpulaunch.exporters.store.bounded import bounded
from gpulaunch.exporters.store.run_events import OF_ITS_HOST
from gpulaunch.exporters.view.attempts import AttemptHistory
from gpulaunch.exporters.view.curves import Axis, Curves, Growth, axis_of, ratio, total
from gpulaunch.exporters.view.files import RunFiles
from gpulaunch.exporters.view.findings import findings_of
from gpulaunch.exporters.view.finished import settled
from gpulaunch.exporters.view.goodput import goodput_curve, goodput_of, is_profiled
from gpulaunch.exporters.view.model import Curve, EventView, FindingView, RankView, RunView, Status, whole_of
from gpulaunch.exporters.view.nodes import collectors_of, devices_of, node_of, sites_of
from gpulaunch.exporters.view.ranks import phase_curves, phase_growths, ranks_of, with_summary
from gpulaunch.exporters.view.source import NodeSource, part
from gpulaunch.exporters.view.values import Values, whole
from gpulaunch.profiler.channel.layout import PHASES
from gpulaunch.profiler.redact import redact_words

MOST_EVENTS: Final = 500
_MOST_RANKS_WITH_CURVES: Final = 128
_NUMBERS: Final = 150_000
"""Approximate limit of values in all rank curves together: large jobs get coarser axes."""
_CURVES_OF_A_RANK: Final = 20
_FEWEST_POINTS: Final = 30
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
    notes: list[str] = field(default_factory=list[str])


def assemble(parts: Parts, *, max_points: int, window_s: float | None) -> RunView:
    """Return the view."""
    files, history, sources = parts.files, parts.history, parts.sources
    first = next((source for source in sources if source.run is not None), None)
    counters = Values(first.counters if first is not None else {})
    gauges = Values(first.gauges if first is not None else {})
    num_ranks = sum(len(part(source.document, "ranks")) for source in sources)
    axis = _axis(sources, num_ranks, max_points, window_s, history.began_s)
    curves = [source.curves(axis, peaks=not parts.live and window_s is None) for source in sources]
    ranks, with_curves = _ranks(sources, curves, num_ranks, parts.notes)
    ranks = with_summary(ranks, files.summary, profiled=is_profiled(files))
    parts.notes += _unseen(ranks)
    steps, samples, times, phases = _growths(sources, curves, with_curves, ranks)
    goodput = goodput_of(files, history, sources, counters)
    productive_s = goodput.get("productive")
    watched = any(source.run is not None for source in sources)
    resumed_steps = (whole(history.ending.get("resumed_step")), history.resumed_step, _highest(sources, _RESUMED))
    resumed_step = next((step for step in resumed_steps if step is not None), None)
    checkpoints = (whole(history.ending.get("checkpoint_step")), resumed_step, _highest(sources, _CHECKPOINT))
    causes = {**(first.failures if first is not None else {}), **files.causes}
    attempts = history.views(causes, parts.status)
    moments = [*(source.seen_s for source in sources), parts.files.touched_s]
    newest_s: float | None = max((moment for moment in moments if moment is not None), default=None)
    elapsed_s = _elapsed(parts)
    spent_s = whole_of(goodput, elapsed_s)
    rates = [rank.steps_per_second_now for rank in ranks if rank.steps_per_second_now is not None]
    lengths = [rank.step_seconds_now for rank in ranks if rank.step_seconds_now is not None]
    recent = [source.recent for source in sources if source.recent is not None]
    program = part(files.job, "program")
    command = files.job.get("command")
    for source in sources:
        parts.notes += [note for note in source.notes if note not in parts.notes]
    error = files.summary.get("error")
    view = RunView(
        run_dir=str(parts.run_dir),
        name=_name(parts, first) or str(program.get("target", "")) or parts.run_dir.name,
        run_id=history.run_id or (first.run.run_id if first is not None and first.run is not None else ""),
        command=redact_words(map(str, command)) if isinstance(command, list) else (),
        status=parts.status,
        phase=history.phase,
        live=parts.live,
        made_s=parts.now_s,
        seen_s=newest_s,
        began_s=history.began_s,
        ended_s=history.ended_s,
        elapsed_seconds=elapsed_s,
        exit_code=history.exit_code,
        stopped_by=history.stopped_by,
        error=error if isinstance(error, str) and parts.status in (Status.FAILED, Status.STOPPED) else "",
        world_size=_world_size(parts, first, ranks),
        num_nodes=whole(files.job.get("nnodes")) or (len(sources) or None),
        attempts=attempts,
        attempt=attempts[-1].number if attempts and not attempts[-1].earlier else None,
        restarts=_restarts(history, counters),
        hang_suspicions=max(history.hang_suspicions, counters.count("hang_suspicions_total")),
        hangs=max(history.hangs, counters.count("hangs_total")),
        stall=history.stall if parts.status is Status.RUNNING else None,
        preempted=history.preempted or bool(gauges.get("preempted")),
        goodput_seconds=goodput,
        goodput_ratio=productive_s / spent_s if productive_s is not None and spent_s > 0 else None,
        steps=max(
            (rank.steps for rank in ranks if rank.steps is not None),
            default=0 if (watched or parts.live) and not ranks else None,
        ),
        steps_per_second_now=min(rates, default=None),
        samples_per_second_now=_samples_now(sources),
        step_seconds_now=sum(lengths) / len(lengths) if lengths else None,
        phase_ratios_now=_mean_ratios(ranks),
        recent_seconds=max((now.at_s - before.at_s for before, now in recent), default=0.0),
        checkpoint_step=max((step for step in checkpoints if step is not None), default=None),
        resumed_step=resumed_step,
        times_s=axis.times_s if axis is not None else (),
        interval_seconds=axis.interval_s if axis is not None else 0.0,
        steps_per_second=_slowest([growth.per_second() for growth in steps]),
        samples_per_second=() if (all_samples := total(samples)) is None else all_samples.per_second(),
        step_mean_seconds=ratio(total(times), total(list(steps))),
        phase_ratios=phase_curves(phases),
        goodput_ratio_over_time=goodput_curve(
            curves[0] if curves and productive_s is not None else Curves.none(),
            axis.times_s if axis is not None else (),
            history.began_s,
        ),
        ranks=tuple(ranks),
        devices=tuple(view for source, own in zip(sources, curves, strict=True) for view in devices_of(source, own)),
        nodes=tuple(
            node_of(source, own) for source, own in zip(sources, curves, strict=True) if source.run is not None
        ),
        collectors=tuple(view for source in sources for view in collectors_of(source)),
        findings=findings_of(parts.findings, sources, history),
        sites=sites_of(sources),
        events=_events(parts),
        watched=watched,
        profiled=is_profiled(files),
        notes=(*files.notes, *parts.notes),
    )
    return settled(view)


_CHECKPOINT: Final = "gpulaunch_checkpoint_step"
_RESUMED: Final = "gpulaunch_resumed_step"


def _highest(sources: Sequence[NodeSource], name: str) -> int | None:
    told = (value for source in sources for key, value in source.gauges.items() if key[0] == name)
    return max(map(round, told), default=None)


def _axis(
    sources: Sequence[NodeSource], num_ranks: int, max_points: int, window_s: float | None, began_s: float | None
) -> Axis | None:
    """Return the axis of the newest run; earlier runs in the directory are not in its curves."""
    spans = [source.span for source in sources if source.span is not None]
    if not spans:
        return None
    begin_s, end_s = min(span[0] for span in spans), max(span[1] for span in spans)
    if began_s is not None:
        begin_s = max(begin_s, min(began_s, end_s))
    if window_s is not None:
        begin_s = max(begin_s, end_s - max(2.0, window_s))
    points = max(_FEWEST_POINTS, _NUMBERS // (_CURVES_OF_A_RANK * max(1, min(num_ranks, _MOST_RANKS_WITH_CURVES))))
    return axis_of(begin_s, end_s, max(1, min(max_points, points)))


def _ranks(
    sources: Sequence[NodeSource], curves: Sequence[Curves], num_ranks: int, notes: list[str]
) -> tuple[list[RankView], set[int] | None]:
    """Return all ranks; with very many, only every n-th has curves."""
    chosen: set[int] | None = None
    if num_ranks > _MOST_RANKS_WITH_CURVES:
        every = sorted(
            {int(label) for source in sources for label in part(source.document, "ranks") if label.isdecimal()}
        )
        step = len(every) / _MOST_RANKS_WITH_CURVES
        chosen = {every[int(index * step)] for index in range(_MOST_RANKS_WITH_CURVES)} if every else set()
        notes.append(f"curves of {len(chosen)} of {num_ranks} ranks only; all have their totals")
    ranks: dict[int, RankView] = {}
    for source, own in zip(sources, curves, strict=True):
        for view in ranks_of(source, own, with_curves=chosen):
            ranks[view.rank] = view
    return [ranks[rank] for rank in sorted(ranks)], chosen


def _unseen(ranks: Sequence[RankView]) -> list[str]:
    """Return notes on unreliable phases, where a boundary of the steps is not seen."""
    of: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.cost is not None and rank.cost.fault and not _EDGES.isdisjoint(rank.cost.parts_unavailable):
            of.setdefault(rank.cost.fault, []).append(rank.rank)
    return [f"not all of a step is seen in {_named(found)}: {fault}" for fault, found in of.items()][:_MOST_FAULTS]


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks, rank {ranks[0]} for one"


def _growths(
    sources: Sequence[NodeSource], curves: Sequence[Curves], chosen: set[int] | None, ranks: Sequence[RankView]
) -> tuple[list[Growth], list[Growth | None], list[Growth | None], list[dict[str, Growth | None]]]:
    """Return per known rank: steps, samples, step time, phases. With very many ranks, only of the chosen ones;
    samples only of ranks whose batches were seen."""
    seen = {str(rank.rank) for rank in ranks if rank.steps is not None}
    with_samples = {str(rank.rank) for rank in ranks if rank.samples}
    steps: list[Growth] = []
    samples: list[Growth | None] = []
    times: list[Growth | None] = []
    phases: list[dict[str, Growth | None]] = []
    for source, own in zip(sources, curves, strict=True):
        for label in (label for label in part(source.document, "ranks") if label in seen):
            if label in with_samples:
                samples.append(own.growth_from_0("gpulaunch_samples_total", label))
            if chosen is not None and not (label.isdecimal() and int(label) in chosen):
                continue
            growth = own.growth_from_0("gpulaunch_steps_total", label)
            if growth is not None:
                steps.append(growth)
            times.append(own.growth_from_0("gpulaunch_step_duration_seconds_sum", label))
            phases.append(phase_growths(own, label))
    return steps, samples, times, phases


def _slowest(curves: Sequence[Curve]) -> Curve:
    known = [curve for curve in curves if curve]
    return tuple(
        min((value for value in values if value is not None), default=None) for values in zip(*known, strict=True)
    )


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


def _name(parts: Parts, first: NodeSource | None) -> str:
    name = parts.files.job.get("name")
    if isinstance(name, str) and name:
        return name
    return first.run.name if first is not None and first.run is not None else ""


def _world_size(parts: Parts, first: NodeSource | None, ranks: Sequence[RankView]) -> int | None:
    told = whole(parts.files.group.get("world_size"))
    if told is None and first is not None and first.run is not None:
        told = first.run.world_size
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
