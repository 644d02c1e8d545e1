"""Collects all data of a run's files over time as rows of one table, for export.

    kind        `sample`, `event`, `finding`, `failure` or `run`
    at_s        time (Unix seconds): the end of a sample's interval, when a finding was first seen, when a failure was
                reported
    begin_s     the beginning of that interval; when a finding was last seen is in `data`
    node        the node
    run_id      the launcher run, if known
    attempt     the attempt in the run, counted from 0; for a failure, the number of its directory
    name        the metric (docs/metrics.md; histograms as `_sum` and `_count`), the event, the rule, the kind of cause
    rank, gpu   labels of a sample, if it has them
    labels      the other labels of a sample
    value       a counter, or the number of a step or of a collective, at `at_s`; the mean of any other gauge
    low, high   minimum and maximum of that gauge over the sample's interval
    data        all other fields of an event, a finding, a failure or a run

Samples are in time order: each moment once, at the finest resolution still retained (docs of `store.limits`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpulaunch.exporters.files.findings import FINDINGS_FILE, read_findings
from gpulaunch.exporters.store.frame import Frame
from gpulaunch.exporters.store.locations import files_of
from gpulaunch.exporters.store.reading import TelemetryReader, UnreadableError
from gpulaunch.exporters.store.run_events import EVENTS_FILE, OF_ITS_HOST, read_lines
from gpulaunch.exporters.store.series import LABELS, Key

_HISTORY_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row."""

    kind: str
    at_s: float
    node: int
    name: str
    begin_s: float | None = None
    run_id: str | None = None
    attempt: int | None = None
    rank: int | None = None
    gpu: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    value: float | None = None
    low: float | None = None
    high: float | None = None
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])


def rows_of(run_dir: Path, *, step_s: float = 0.0, notes: list[str]) -> Iterator[Row]:
    """Yield the rows of a run.

    Args:
        run_dir: its directory.
        step_s: samples about this far apart are fine enough; 0: the finest available.
        notes: receives a line for everything that cannot be read.
    """
    files = files_of(run_dir)
    if not files:
        notes.append("telemetry.sqlite is missing: there are no samples")
        yield from _without(run_dir, notes)
    for node, path in files:
        try:
            with TelemetryReader(path) as reader:
                yield from _of_node(reader, node, step_s)
                notes += reader.notes
        except UnreadableError as error:
            notes.append(str(error))
            yield from _without(path.parent, notes, node)


def _of_node(reader: TelemetryReader, node: int, step_s: float) -> Iterator[Row]:
    run_ids: dict[int, str] = {}
    for run in reader.runs():
        run_ids[run.id] = run.run_id
        data = {"name": run.name, "world_size": run.world_size, "host": run.host}
        yield Row(kind="run", at_s=run.began_s, node=node, name=run.name, run_id=run.run_id, data=data)
    for number, at_s, first in reader.failed():
        name = str(first.get("kind", "other"))
        yield Row(kind="failure", at_s=at_s, node=node, name=name, attempt=number, data=first)
    for at_s, what, fields in reader.events():
        yield Row(kind="event", at_s=at_s, node=node, name=what, attempt=_attempt(fields), data=fields)
    for found in reader.findings():
        data = {
            **found.told,
            "active": found.active,
            "last_seen_s": found.last_seen_s,
            "lost_seconds": found.lost_seconds,
        }
        yield Row(
            kind="finding",
            at_s=found.first_seen_s,
            node=node,
            name=str(found.told.get("rule", "")),
            run_id=run_ids.get(found.run),
            data=data,
        )
    named = _Named(reader.keys)
    for frame in reader.frames(step_s=step_s):
        yield from named.samples(frame, node, run_ids.get(frame.run))


class _Named:
    """The series by slot, parsed once."""

    def __init__(self, keys: tuple[Sequence[Key], Sequence[Key]]) -> None:
        self._gauges, self._counters = ([_apart(key) for key in of] for of in keys)

    def samples(self, frame: Frame, node: int, run_id: str | None) -> Iterator[Row]:
        begin_s, end_s, attempt = frame.begin_s, frame.end_s, frame.attempt
        for (name, rank, gpu, labels), value in zip(self._counters, frame.counters, strict=False):
            if value == value:  # NaN: unknown
                yield Row(
                    kind="sample",
                    at_s=end_s,
                    begin_s=begin_s,
                    node=node,
                    run_id=run_id,
                    attempt=attempt,
                    name=name,
                    rank=rank,
                    gpu=gpu,
                    labels=labels,
                    value=value,
                )
        gauges = zip(self._gauges, frame.lows, frame.means, frame.highs, strict=False)
        for (name, rank, gpu, labels), low, mean, high in gauges:
            if mean == mean:
                yield Row(
                    kind="sample",
                    at_s=end_s,
                    begin_s=begin_s,
                    node=node,
                    run_id=run_id,
                    attempt=attempt,
                    name=name,
                    rank=rank,
                    gpu=gpu,
                    labels=labels,
                    value=mean,
                    low=low,
                    high=high,
                )


def _apart(key: Key) -> tuple[str, int | None, str | None, dict[str, str]]:
    name, values = key[0], key[1:]
    names = LABELS.get(name, ())
    labels = dict(zip(names, values, strict=True)) if len(names) == len(values) else {}
    if not labels and values:  # a metric of another version
        labels = {f"label_{index}": value for index, value in enumerate(values)}
    rank = labels.pop("rank", "")
    if rank and not rank.isdecimal():
        labels["rank"] = rank
    return name, int(rank) if rank.isdecimal() else None, labels.pop("gpu", None), labels


def _without(run_dir: Path, notes: list[str], node: int = 0) -> Iterator[Row]:
    """Yield the rows that are not telemetry."""
    lines, _ = read_lines(run_dir / EVENTS_FILE, most_bytes=_HISTORY_BYTES)
    for line in lines:
        at_s, what = line.get("time_s"), line.get("event")
        if isinstance(at_s, (int, float)) and isinstance(what, str):
            data = {
                name: value for name, value in line.items() if name not in ("version", "time_s", "event", *OF_ITS_HOST)
            }
            yield Row(kind="event", at_s=float(at_s), node=node, name=what, attempt=_attempt(line), data=data)
    for told in read_findings(run_dir / FINDINGS_FILE, notes):
        data = {name: value for name, value in told.items() if name not in ("version", "first_seen_s")}
        yield Row(kind="finding", at_s=told["first_seen_s"], node=node, name=told["rule"], data=data)


def _attempt(fields: Mapping[str, Any]) -> int | None:
    attempt = fields.get("attempt")
    return attempt if isinstance(attempt, int) and not isinstance(attempt, bool) and 0 <= attempt < 1 << 31 else None
