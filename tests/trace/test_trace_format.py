"""What holds a trace against the Trace Event Format finds what is not as that asks: one fault at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from trace_format import faults_of

X = {"ph": "X", "cat": "cpu_op", "pid": 7, "tid": 8, "args": {}}
M = {"ph": "M", "ts": 0.0, "pid": 7, "tid": 0}
ARROW = {"cat": "fwdbwd", "name": "fwdbwd", "pid": 7, "tid": 8, "id": 1}


def a_trace() -> dict[str, Any]:
    """Two operations, one in the other and not in the order of their times; a third; an arrow; names; an instant."""
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {**X, "name": "aten::addmm", "ts": 101.5, "dur": 1.25},
            {**X, "name": "aten::linear", "ts": 100, "dur": 3.0},
            {**X, "name": "aten::relu", "ts": 103.0, "dur": 0.5},
            {**ARROW, "ph": "s", "ts": 100.5},
            {**ARROW, "ph": "f", "ts": 103.25, "bp": "e"},
            {**M, "name": "process_name", "args": {"name": "python"}},
            {**M, "name": "process_sort_index", "args": {"sort_index": 7}},
            {**M, "name": "thread_name", "tid": 8, "args": {"name": "thread 8"}},
            {"ph": "i", "s": "g", "name": "end", "pid": "", "tid": "", "ts": 200.0},
            {"ph": "C", "name": "memory", "pid": 7, "tid": 0, "ts": 100.0, "args": {"bytes": 5}},
            {"ph": "B", "name": "step", "pid": 7, "tid": 8, "ts": 100.0},
            {"ph": "E", "pid": 7, "tid": 8, "ts": 104.0},
        ],
    }


def test_a_file_as_the_format_asks_has_no_fault() -> None:
    assert faults_of(json.loads(json.dumps(a_trace()))) == []


def change(number: int, **to: Any) -> Callable[[dict[str, Any]], None]:
    """Give an event other values, or none where they are None."""

    def damage(trace: dict[str, Any]) -> None:
        event = {**trace["traceEvents"][number], **to}
        trace["traceEvents"][number] = {key: value for key, value in event.items() if value is not None}

    return damage


def without(number: int) -> Callable[[dict[str, Any]], None]:
    return lambda trace: trace["traceEvents"].pop(number)


LINEAR, RELU, BEGUN, ENDED, PROCESS, SORTED, THREAD, INSTANT, COUNTER, B, E = range(1, 12)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (change(LINEAR, ph=None), "event 1: phase None"),
        (change(LINEAR, ph="Z"), "event 1: phase 'Z'"),
        (change(LINEAR, name=None), "event 1: no name"),
        (change(LINEAR, ts=None), "event 1: time None"),
        (change(LINEAR, ts="100"), "event 1: time '100'"),
        (change(LINEAR, ts=float("nan")), "event 1: time nan"),
        (change(LINEAR, ts=-1), "event 1: time -1"),
        (change(LINEAR, dur=None), "event 1: duration None"),
        (change(LINEAR, dur=-0.5), "event 1: duration -0.5"),
        (change(LINEAR, pid=None), "event 1: pid None"),
        (change(LINEAR, tid=8.5), "event 1: tid 8.5"),
        (change(LINEAR, args=[]), "event 1: arguments that are no object"),
        (change(LINEAR, cat=3), "event 1: a category that is no text"),
        (change(LINEAR, dur=2.0), "thread (7, 8): aten::addmm outlasts aten::linear, in which it began"),
        (change(RELU, ts=102.9), "thread (7, 8): aten::relu outlasts aten::linear, in which it began"),
        (change(RELU, tid=9), "thread 9 of process 7 has no name"),
        (change(BEGUN, id=None), "event 3: an arrow without an id"),
        (change(BEGUN, ts=103.5), "arrow 1 ends where none has begun"),
        (without(BEGUN), "arrow 1 ends where none has begun"),
        (without(PROCESS), "process 7 has no name"),
        (change(PROCESS, args={}), "event 5: metadata 'process_name' with {}"),
        (change(PROCESS, name="a name"), "event 5: metadata 'a name' with {'name': 'python'}"),
        (change(SORTED, args={"sort_index": "7"}), "event 6: metadata 'process_sort_index' with {'sort_index': '7'}"),
        (without(THREAD), "thread 8 of process 7 has no name"),
        (change(INSTANT, s="x"), "event 8: scope 'x'"),
        (change(COUNTER, args={}), "event 9: a counter without numbers"),
        (without(B), "thread (7, 8): an end without a begin"),
        (without(E), "thread (7, 8): a begin without an end"),
        (change(E, ts=99.0), "thread (7, 8): a begin or an end that comes before an earlier one"),
        (lambda trace: trace.update(displayTimeUnit="s"), "an unknown unit of time"),
        (lambda trace: trace.update(traceEvents={}), "no object with a list of events"),
        (lambda trace: trace["traceEvents"].append(3), "event 12: no object"),
    ],
)
def test_each_fault_is_found(damage: Callable[[dict[str, Any]], None], fault: str) -> None:
    trace = a_trace()
    damage(trace)

    assert fault in faults_of(trace)
