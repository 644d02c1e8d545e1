"""The facts of an attempt that are not time series, as JSON: locations, causes, lines of the program, text states.

    {"version": 1, "at_s", "group": {"run_id", "name", "attempt", "world_size", "node_rank"},
     "counters": [[name, [label values], value] ...], "gauges": the same,
     "ranks": {"0": {"local_rank", "pid", "armed", "step_source", "last_step_s", "unavailable", "fault",
                     "sites": [[kind, text, count, size_bytes, blocked_ns, gpu_ns, pinned, non_blocking] ...]}},
     "devices": {"0": {"uuid", "model"}},
     "collectors": {"ranks": {"available", "reason", "errors", "spent_s"}}}

`counters` and `gauges` are the newest values, exactly. A rank that has ended is no longer in the state: its facts and
counters are carried over. The last gauges of a GPU or of the node are not: they do not describe the present.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from gpulaunch.exporters.store.bounded import LARGEST
from gpulaunch.exporters.store.series import LABELS, Key, Sample
from gpulaunch.profiler.record import NodeState, Site, TrainingState

VERSION: Final = 1
_MOST_SITES: Final = 24
"""Per rank: the most expensive ones."""
_NS_PER_S: Final = 1e9


def document_of(state: NodeState, sample: Sample, before: Mapping[str, Any] | None, *, at_s: float) -> dict[str, Any]:
    """Return the document of a state.

    Args:
        state: the state.
        sample: its values.
        before: the previous document of the same attempt: the source of what the state no longer has.
        at_s: when the state was taken (Unix time).
    """
    places = {} if state.group is None else {place.rank: place for place in state.group.ranks}
    wall_minus_monotonic_s = at_s - state.taken_monotonic_ns / _NS_PER_S
    ranks: dict[str, Any] = dict(_part(before, "ranks"))
    for training in state.training:
        place = places.get(training.rank)
        ranks[str(training.rank)] = {
            "local_rank": place.local_rank if place is not None else None,
            "pid": place.pid if place is not None else None,
            **_training(training, wall_minus_monotonic_s),
        }
    document = {
        "version": VERSION,
        "at_s": at_s,
        "group": _part(before, "group"),
        "counters": _rows({**values_of(before or {}, "counters"), **sample.counters}),
        "gauges": _rows({**carried_on(values_of(before or {}, "gauges")), **sample.gauges}),
        "ranks": ranks,
        "devices": {
            **_part(before, "devices"),
            **{device.label: {"uuid": device.uuid, "model": device.model} for device in state.devices},
        },
        "collectors": {
            collector.value: {
                "available": condition.available,
                "reason": condition.reason,
                "errors": condition.errors,
                "spent_s": condition.spent_s,
            }
            for collector, condition in state.collectors.items()
        },
    }
    if (group := state.group) is not None:
        document["group"] = {
            "run_id": group.run_id,
            "name": group.name,
            "attempt": group.attempt,
            "world_size": group.world_size,
            "node_rank": group.node_rank,
        }
    return document


def values_of(document: Mapping[str, Any], part: str) -> dict[Key, float]:
    """Return the newest counters or gauges, without values that are not usable numbers."""
    values: dict[Key, float] = {}
    rows = document.get(part)
    for row in rows if isinstance(rows, list) else []:
        match row:
            case [str(name), list(labels), int() | float() as value] if abs(value) <= LARGEST:  # NaN is not
                values[name, *map(str, labels)] = value
            case _:
                pass
    return values


def carried_on(gauges: Mapping[Key, float]) -> dict[Key, float]:
    """Return the gauges that stay meaningful when no longer reported: of ranks, and of the run as a whole."""
    return {key: value for key, value in gauges.items() if LABELS.get(key[0], ())[:1] in ((), ("rank",))}


def _training(training: TrainingState, wall_minus_monotonic_s: float) -> dict[str, Any]:
    last_ns = training.last_step_monotonic_ns
    dear = sorted(training.sites, key=_weight, reverse=True)[:_MOST_SITES]
    return {
        "armed": training.armed,
        "step_source": training.step_source,
        "last_step_s": None if last_ns is None else round(last_ns / _NS_PER_S + wall_minus_monotonic_s, 3),
        "unavailable": list(training.hooks_unavailable),
        "fault": training.fault,
        "sites": [
            [
                *(site.kind, site.text, site.count, site.size_bytes),
                *(site.blocked_ns, site.gpu_ns, site.pinned, site.non_blocking),
            ]
            for site in dear
        ],
    }


def _weight(site: Site) -> tuple[int, int, int]:
    return site.blocked_ns + site.gpu_ns, site.size_bytes, site.count


def _rows(values: Mapping[Key, float]) -> list[list[Any]]:
    return [[key[0], list(key[1:]), value] for key, value in values.items()]


def _part(before: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    part = (before or {}).get(name)
    return cast("dict[str, Any]", part) if isinstance(part, dict) else {}
