"""Computes goodput: the time of a run by bucket, and the productive share over time. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gpulaunch.exporters.view.attempts import AttemptHistory
from gpulaunch.exporters.view.curves import Curves
from gpulaunch.exporters.view.files import RunFiles
from gpulaunch.exporters.view.rank_model import Curve
from gpulaunch.exporters.view.source import NodeSource, part
from gpulaunch.exporters.view.values import Values
from gpulaunch.profiler.record import GOODPUT_BUCKETS


def is_profiled(files: RunFiles) -> bool:
    """Whether profiling was requested, as far as is known: not with --no-profile."""
    return files.job.get("profile") is not False


def goodput_of(
    files: RunFiles, history: AttemptHistory, sources: Sequence[NodeSource], counters: Values
) -> dict[str, float | None]:
    """Return the time by bucket: from the agent's final summary, else from the sidecar."""
    said = part(history.ending, "goodput_seconds")
    if not said and history.ended_s is not None:
        said = part(files.summary, "goodput_seconds")
    told = said or counters.one("goodput_seconds_total")
    seconds = {bucket: told.get(bucket) for bucket in GOODPUT_BUCKETS}
    known = {
        bucket: float(value)
        for bucket, value in seconds.items()
        if isinstance(value, (int, float)) and 0 <= value < 1e12
    }
    if not known:
        return {}
    goodput = {bucket: known.get(bucket, 0.0) for bucket in GOODPUT_BUCKETS}
    if not said:
        seen_s = next((source.seen_s for source in sources if source.run is not None), None)
        if seen_s is not None and history.began_s is not None:
            held_s = _held_s(goodput, seen_s - history.began_s)
            goodput["productive"] = max(0.0, goodput["productive"] - held_s)
    unknown = [bucket for bucket in GOODPUT_BUCKETS if bucket in told and told[bucket] is None]
    if goodput["productive"] and not is_profiled(files):  # an older gpulaunch counted all rank time as work
        unknown += ["productive", "checkpoint_stall"]
    if not said and history.lost_work_unknown:
        unknown.append("lost_work")
    return {**goodput, **dict.fromkeys(unknown)}


_WAS_PRODUCTIVE: Final = ("checkpoint_stall", "detection", "teardown", "lost_work")
"""Buckets that time first counted as productive may be moved to."""


def _held_s(told: Mapping[str, float], elapsed_s: float) -> float:
    """Return the time first counted as productive and later as something else: a counter does not decrease.

    It is the excess of all buckets over the elapsed time, limited to what can have been productive: a clock may have
    been set, and the launcher runs for a moment before it records its start.
    """
    beyond_s = sum(told.values()) - max(0.0, elapsed_s)
    return max(0.0, min(beyond_s, sum(told.get(bucket, 0.0) for bucket in _WAS_PRODUCTIVE)))


def goodput_curve(curves: Curves, times_s: Sequence[float], began_s: float | None) -> Curve:
    """Return the productive share of the time up to each moment, 0 to 1; began_s: begin of the run."""
    known = {bucket: curves.counter("gpulaunch_goodput_seconds_total", bucket) for bucket in GOODPUT_BUCKETS}
    if not known["productive"]:
        return ()
    shares: list[float | None] = []
    for index, at_s in enumerate(times_s):
        values = {bucket: curve[index] for bucket, curve in known.items() if curve}
        told = {bucket: value for bucket, value in values.items() if value is not None}
        # The final value of an earlier run in the directory is not known here.
        held_s = _held_s(told, at_s - began_s) if began_s is not None and at_s >= began_s else 0.0
        whole_s = sum(told.values()) - held_s
        known_productive = "productive" in told and whole_s > 0
        shares.append(max(0.0, told["productive"] - held_s) / whole_s if known_productive else None)
    return tuple(shares)
