"""Reads one node's data, from its sidecar's file or state, as the input of a view."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from gpulaunch.exporters.store.attempt_facts import carried_on, document_of, values_of
from gpulaunch.exporters.store.bounded import LARGEST
from gpulaunch.exporters.store.frame import Frame
from gpulaunch.exporters.store.limits import LEVELS
from gpulaunch.exporters.store.reading import FindingRow, RunRow, TelemetryReader, UnreadableError
from gpulaunch.exporters.store.series import Key, sample_of
from gpulaunch.exporters.view.curves import Axis, Curves
from gpulaunch.profiler.record import NodeState

RECENT_S: Final = 30.0
_LOOKS: Final = 90
_STEPS: Final = "gpulaunch_steps_total"
_MEMORY: Final = ("gpulaunch_host_memory_bytes", "gpulaunch_gpu_memory_bytes")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The counters of a node at one moment."""

    at_s: float
    counters: Mapping[Key, float]


@dataclass(kw_only=True)
class NodeSource:
    """One node."""

    node: int
    run: RunRow | None = None
    """The newest launcher run that it has data of."""
    document: Mapping[str, Any] = field(default_factory=dict[str, Any])
    counters: Mapping[Key, float] = field(default_factory=dict[Key, float])
    gauges: Mapping[Key, float] = field(default_factory=dict[Key, float])
    seen_s: float | None = None
    recent: tuple[Moment, Moment] | None = None
    """Two moments about `RECENT_S` apart: the newest one with steps, and an earlier one."""
    span: tuple[float, float] | None = None
    """Begin and end of its rows."""
    findings: list[FindingRow] = field(default_factory=list[FindingRow])
    events: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list[tuple[float, str, dict[str, Any]]])
    failures: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    reader: TelemetryReader | None = None
    """Open for the curves, until `close`."""
    notes: list[str] = field(default_factory=list[str])

    def curves(self, axis: Axis | None, *, peaks: bool) -> Curves:
        """Read the rows for an axis; `peaks`: also the peak memory over all samples, which costs more."""
        if axis is None or self.reader is None:
            return Curves.none()
        margin_s = max(2.0, axis.interval_s)
        since_s, until_s = axis.begin_s - margin_s, axis.times_s[-1] + margin_s
        try:
            frames: list[Frame] = list(
                self.reader.frames(
                    since_s=since_s, until_s=until_s, step_s=axis.interval_s, most=2 * axis.num_intervals
                )
            )
            highest = _highest(self.reader, self.run, since_s, until_s) if peaks else {}
        except UnreadableError as error:
            self.notes.append(str(error))
            return Curves.none()
        first_look_s = self.run.began_s if self.run is not None else math.inf
        return Curves(axis, frames, self.reader.keys, first_look_s=first_look_s, highest=highest)

    def close(self) -> None:
        """Close the file."""
        if self.reader is not None:
            self.notes += [note for note in self.reader.notes if note not in self.notes]
            self.reader.close()
            self.reader = None


def read_source(path: Path, node: int) -> NodeSource:
    """Read a file; problems are listed in the notes. The caller must `close` it."""
    source = NodeSource(node=node)
    try:
        reader = source.reader = TelemetryReader(path)
    except UnreadableError as error:
        source.notes.append(_told(node, str(error)))
        return source
    try:
        _read(source, reader)
    except UnreadableError as error:
        source.notes.append(_told(node, str(error)))
    return source


def live_source(state: NodeState, kept: NodeSource | None, earlier: NodeState | None) -> NodeSource:
    """Return the state of a running sidecar, with its file's data for the time before."""
    node = state.group.node if state.group is not None else kept.node if kept is not None else 0
    source = kept if kept is not None else NodeSource(node=node)
    source.node = node
    at_s = state.taken_wall_ns / 1e9
    sample = sample_of(state)
    group = state.group
    same = group is None or (source.run is not None and source.run.run_id == group.run_id)
    if not same:
        source.run, source.recent = None, None
    document = document_of(state, sample, source.document if same else None, at_s=at_s)
    if group is not None and source.run is None:
        source.run = RunRow(
            id=0,
            run_id=group.run_id,
            name=group.name,
            node=group.node,
            world_size=group.world_size,
            host="",
            began_s=at_s,
        )
    source.document = document
    source.counters, source.gauges = values_of(document, "counters"), values_of(document, "gauges")
    source.seen_s = at_s
    now = Moment(at_s=at_s, counters=sample.counters)
    if earlier is not None and at_s - earlier.taken_wall_ns / 1e9 > 0:
        source.recent = (Moment(at_s=earlier.taken_wall_ns / 1e9, counters=sample_of(earlier).counters), now)
    elif source.recent is not None and 0 < at_s - source.recent[0].at_s <= 2 * RECENT_S:
        source.recent = (source.recent[0], now)
    else:
        source.recent = None
    return source


def _highest(reader: TelemetryReader, run: RunRow | None, since_s: float, until_s: float) -> dict[Key, float]:
    """Return the maxima of memory gauges. Curves skip rows when there are many; this skips none, and uses the longest
    rows, which keep the maximum of the rows they were made from."""
    slots = [(slot, key) for slot, key in enumerate(reader.keys[0]) if key[0] in _MEMORY]
    highest: dict[Key, float] = {}
    for frame in reader.frames(since_s=since_s, until_s=until_s, step_s=LEVELS[-1].length_s):
        for slot, key in slots if run is not None and frame.run == run.id else ():
            if slot < len(frame.highs) and highest.get(key, -1.0) < frame.highs[slot] <= LARGEST:
                highest[key] = frame.highs[slot]
    return highest


def _read(source: NodeSource, reader: TelemetryReader) -> None:
    runs = reader.runs()
    if runs:
        source.run = runs[-1]
        source.node = runs[-1].node
    source.span = reader.span()
    source.findings, source.events, source.failures = reader.findings(), reader.events(), reader.failures()
    documents = [document for document in reader.documents() if source.run and document.run == source.run.id]
    if documents:
        source.document = documents[-1].content
        source.counters = values_of(source.document, "counters")
        source.gauges = values_of(source.document, "gauges")
        source.seen_s = documents[-1].at_s
    looks = [look for look in reader.newest(_LOOKS) if source.run and look.run == source.run.id]
    for look in looks:  # an ended rank is no longer in the newest one
        if source.seen_s is None or look.end_s > source.seen_s:
            counters, gauges = reader.values(look)
            source.counters, source.gauges = {**source.counters, **counters}, {**carried_on(source.gauges), **gauges}
            source.seen_s = look.end_s
    source.recent = _recent(looks, reader)


def _recent(looks: list[Frame], reader: TelemetryReader) -> tuple[Moment, Moment] | None:
    """Return the last time range in which there were ranks."""
    slots = [slot for slot, key in enumerate(reader.keys[1]) if key[0] == _STEPS]
    with_ranks = [
        look for look in looks if any(slot < len(look.counters) and look.counters[slot] > 0 for slot in slots)
    ]
    if len(with_ranks) < 2:
        return None
    last = with_ranks[-1]
    first = next(look for look in with_ranks if last.end_s - look.end_s <= RECENT_S)
    if first is last:
        first = with_ranks[-2]
    if last.end_s <= first.end_s or last.end_s - first.end_s > 4 * RECENT_S:
        return None
    return (
        Moment(at_s=first.end_s, counters=reader.values(first)[0]),
        Moment(at_s=last.end_s, counters=reader.values(last)[0]),
    )


def _told(node: int, line: str) -> str:
    return f"node {node}: {line}" if node else line


def part(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a document if it is an object, else an empty one."""
    value = document.get(name)
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}
