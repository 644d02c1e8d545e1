"""What the Trace Event Format asks of a file, which is what Perfetto and chrome://tracing read. Not a test module.

The format in short: an object with a list `traceEvents`, in any order. Each event has a phase (`ph`), a process and a
thread, and a time in microseconds. One with a duration (`X`) says how long it is, stands for a begin and an end, and so
lies either within or beside any other of its thread. Processes and threads get their names from metadata (`M`). Arrows
(`s`, `t`, `f`) have an id, by which their ends find each other.

Ids of processes and threads are numbers; words are taken, too, and are their own names.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

Events = list[dict[str, Any]]
Thread = tuple[Any, Any]

PHASES = frozenset("BEXiICbnestfPNODMVvRc()")
METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
GRAIN_US = 0.002
"""Times are written in nanoseconds: an end, which is a sum, may be off by two of them."""


def faults_of(trace: Any) -> list[str]:
    """What is not as the format asks; nothing: it is such a file."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no object with a list of events"]
    faults = [] if trace.get("displayTimeUnit", "ms") in ("ms", "ns") else ["an unknown unit of time"]
    events: Events = []
    for number, event in enumerate(trace["traceEvents"]):
        of_event = [*_faults_of_event(event)] if isinstance(event, dict) else ["no object"]
        faults += [f"event {number}: {fault}" for fault in of_event]
        if not of_event:
            events.append(event)
    return [*faults, *_unnamed(events), *_overlapping(events), *_unmatched(events), *_loose_arrows(events)]


def _faults_of_event(event: dict[str, Any]) -> Iterator[str]:
    phase, arguments = event.get("ph"), event.get("args", {})
    if not isinstance(phase, str) or phase not in PHASES:
        yield f"phase {phase!r}"
        return
    if not isinstance(event.get("name"), str) and phase != "E":
        yield "no name"
    if not _is_time(event.get("ts")):
        yield f"time {event.get('ts')!r}"
    for which in ("pid", "tid"):
        if type(event.get(which)) not in (int, str):
            yield f"{which} {event.get(which)!r}"
    if not isinstance(event.get("cat", ""), str):
        yield "a category that is no text"
    if not isinstance(arguments, dict):
        yield "arguments that are no object"
    elif phase == "M":
        key, kind = METADATA.get(str(event.get("name")), ("", str))
        if type(arguments.get(key)) is not kind:
            yield f"metadata {event.get('name')!r} with {arguments!r}"
    elif phase == "C" and not (arguments and all(_is_number(value) for value in arguments.values())):
        yield "a counter without numbers"
    if phase == "X" and not _is_time(event.get("dur")):
        yield f"duration {event.get('dur')!r}"
    if phase in "iI" and event.get("s", "t") not in ("g", "p", "t"):
        yield f"scope {event['s']!r}"
    if phase in "stf" and type(event.get("id")) not in (int, str):
        yield "an arrow without an id"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_time(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _thread(event: dict[str, Any]) -> Thread:
    return event["pid"], event["tid"]


def _unnamed(events: Events) -> Iterator[str]:
    """Processes and threads in which something took its time, and that are a number without a name."""
    named = {(event["name"], event["pid"]) for event in events if event["ph"] == "M"}
    named |= {(event["name"], *_thread(event)) for event in events if event["ph"] == "M"}
    threads = {_thread(event) for event in events if event["ph"] in "BEX"}
    for pid in sorted({pid for pid, _ in threads}, key=str):
        if type(pid) is int and ("process_name", pid) not in named:
            yield f"process {pid!r} has no name"
    for pid, tid in sorted(threads, key=str):
        if type(tid) is int and ("thread_name", pid, tid) not in named:
            yield f"thread {tid!r} of process {pid!r} has no name"


def _overlapping(events: Events) -> Iterator[str]:
    """Events of one thread of which one begins within the other and ends after it."""
    by_thread: dict[Thread, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_thread[_thread(event)].append((event["ts"], -event["dur"], event["name"]))
    for thread, spans in by_thread.items():
        open_until: list[tuple[float, str]] = []
        for began, minus_took, name in sorted(spans):
            ended = began - minus_took
            while open_until and open_until[-1][0] <= began + GRAIN_US:
                open_until.pop()
            if open_until and ended > open_until[-1][0] + GRAIN_US:
                yield f"thread {thread}: {name} outlasts {open_until[-1][1]}, in which it began"
            open_until.append((ended, name))


def _unmatched(events: Events) -> Iterator[str]:
    """Begins and ends of a thread that are not in the order of their times, or do not come in pairs."""
    depth: dict[Thread, int] = defaultdict(int)
    last: dict[Thread, float] = {}
    for event in events:
        if event["ph"] in "BE":
            thread = _thread(event)
            if event["ts"] < last.get(thread, 0.0):
                yield f"thread {thread}: a begin or an end that comes before an earlier one"
            last[thread] = event["ts"]
            depth[thread] += 1 if event["ph"] == "B" else -1
            if depth[thread] < 0:
                yield f"thread {thread}: an end without a begin"
    yield from (f"thread {thread}: a begin without an end" for thread, left in depth.items() if left > 0)


def _loose_arrows(events: Events) -> Iterator[str]:
    """Arrows that end where none has begun, or before."""
    began: dict[tuple[str, Any], float] = {}
    for event in events:
        if event["ph"] == "s":
            key = event.get("cat", ""), event["id"]
            began[key] = min(event["ts"], began.get(key, math.inf))
    for event in events:
        if event["ph"] in "tf" and event["ts"] + GRAIN_US < began.get((event.get("cat", ""), event["id"]), math.inf):
            yield f"arrow {event['id']!r} ends where none has begun"
