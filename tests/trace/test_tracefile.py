"""A trace as Kineto writes it: found, whole or not, counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.daemon import tracefile
from gpulaunch.profiler.daemon.tracefile import Contents, TraceFileError, TraceFileWatch, contents_of, part_name

# Two operations, the window, a name of a process and an instant, as torch 2.13 lays a trace out.
TRACE = """{
  "schemaVersion": 1,
  "deviceProperties": [
  ],
  "traceEvents": [
  {
    "ph": "X", "cat": "cpu_op", "name": "aten::linear", "pid": 7, "tid": 7,
    "ts": 100.5, "dur": 3.2,
    "args": {
      "External id": 1,"Record function id": 0, "shapes": [[8, 16], []]
    }
  },
  {
    "ph": "X", "cat": "cpu_op", "name": "aten::t", "pid": 7, "tid": 7, "ts": 101.5, "dur": 1.2, "args": {}
  },
  {
    "ph": "X", "cat": "Trace", "ts": 98.0, "dur": 9.0, "pid": "Spans", "tid": "PyTorch Profiler",
    "name": "PyTorch Profiler (0)", "args": { "Op count": 0 }
  },
  {
    "name": "process_name", "ph": "M", "ts": 99.0, "pid": 7, "tid": 0, "args": {"name": "python"}
  },
  {
    "name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": 200.0
  }
  ],
  "traceName": "rank-0.part_7.json",
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1700000000000000000
}"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "rank-0.part_7.json"
    path.write_text(text)
    return str(path)


def test_what_has_a_duration_is_counted(tmp_path: Path) -> None:
    assert contents_of(write(tmp_path, TRACE)) == Contents(num_events=2, copied_bytes={})


def test_a_trace_in_which_nothing_happened_is_one(tmp_path: Path) -> None:
    nothing = json.dumps({"traceEvents": [], "traceName": "x"})
    assert contents_of(write(tmp_path, nothing)) == Contents(num_events=0, copied_bytes={})


def test_what_the_gpu_copied_is_summed_by_direction(tmp_path: Path) -> None:
    """As Kineto names it on a GPU: CuptiActivity.h."""

    def copy(name: str, **args: object) -> dict[str, object]:
        return {"ph": "X", "cat": "gpu_memcpy", "name": name, "ts": 1.0, "dur": 2.0, "args": {"stream": 7, **args}}

    events = [
        copy("Memcpy HtoD (Pageable -> Device)", bytes=1000),
        copy("Memcpy HtoD (Pinned -> Device)", bytes=24),
        copy("Memcpy DtoH (Device -> Pinned)", bytes=4),
        copy("Memcpy PtoP (Device -> Device)", bytes=1 << 40),
        copy("Memcpy HtoD (Pageable -> Device)"),
        {"ph": "X", "cat": "cpu_op", "name": "Memcpy HtoD", "ts": 1.0, "dur": 2.0, "args": {"bytes": 5}},
    ]
    found = contents_of(write(tmp_path, json.dumps({"traceEvents": events})))

    assert found == Contents(num_events=6, copied_bytes={"h2d": 1024, "d2h": 4})


def test_names_may_hold_any_character(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(TRACE.replace("aten::t", 'tab\tbell\x07 quote\\" ').encode() + b"\n")
    assert contents_of(str(path)) == Contents(num_events=2, copied_bytes={})

    path.write_bytes(TRACE.encode().replace(b"aten::t", b"\xff\xfe"))
    assert contents_of(str(path)) == Contents(num_events=2, copied_bytes={})


@given(st.integers(0, len(TRACE) - 2))
def test_no_beginning_of_a_trace_is_a_trace(length: int) -> None:
    """Whatever was written when the rank was killed; only blanks may be missing at the end."""
    with pytest.raises(ValueError):  # noqa: PT011 (the JSON reader's own)
        json.loads(TRACE[:length])


@pytest.mark.parametrize("length", [0, 1, 100, 400, len(TRACE) - 1])
def test_half_a_trace_is_told(tmp_path: Path, length: int) -> None:
    with pytest.raises(TraceFileError, match="no JSON"):
        contents_of(write(tmp_path, TRACE[:length]))


@pytest.mark.parametrize("text", ["{}", '{"a": 1}', '"x"', "3", '{"traceEvents": 3}'])
def test_json_that_is_no_trace_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceFileError, match="no list of events"):
        contents_of(write(tmp_path, text))


def test_a_bare_list_of_events_is_a_trace_too(tmp_path: Path) -> None:
    """For those who show it."""
    assert contents_of(write(tmp_path, "[]")) == Contents(num_events=0, copied_bytes={})


def test_a_huge_one_is_looked_at_from_its_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracefile, "MOST_BYTES", 100)

    assert contents_of(write(tmp_path, TRACE)) is None
    with pytest.raises(TraceFileError, match="no end"):
        contents_of(write(tmp_path, TRACE[:-20]))


def test_a_trace_is_whole_when_it_has_stopped_growing_and_ends(tmp_path: Path) -> None:
    watched = TraceFileWatch(str(tmp_path), 0)
    assert not watched.look()
    write(tmp_path, TRACE[:300])
    assert [watched.look(), watched.look()] == [False, False]  # still, but it does not end

    write(tmp_path, TRACE)
    assert [watched.look(), watched.look(), watched.look()] == [False, True, False]  # told once
    assert watched.size_bytes == len(TRACE)


def test_the_end_of_an_event_is_not_the_end_of_the_trace(tmp_path: Path) -> None:
    """Kineto may be between two of its writes."""
    end_of_an_event = TRACE.index("},\n  {", TRACE.index("aten::linear")) + 1
    write(tmp_path, TRACE[:end_of_an_event])
    watched = TraceFileWatch(str(tmp_path), 0)

    assert TRACE[:end_of_an_event].endswith("}")
    assert [watched.look(), watched.look()] == [False, False]


def test_one_that_has_not_its_last_name_is_not_whole_yet(tmp_path: Path) -> None:
    part = tmp_path / "rank-0.part_7.json.tmp"
    part.write_text(TRACE)
    watched = TraceFileWatch(str(tmp_path), 0)
    assert [watched.look(), watched.look()] == [False, False]
    assert watched.path == str(part)

    part.rename(tmp_path / "rank-0.part_7.json")
    assert [watched.look(), watched.look()] == [False, True]


def test_the_trace_of_a_rank_is_found_whatever_pid_is_in_its_name(tmp_path: Path) -> None:
    for name in ("rank-11.part_5.json", "rank-1.json", "rank-0.part_5.json", "trace.json"):
        (tmp_path / name).write_text(TRACE)
    watched = TraceFileWatch(str(tmp_path), 1)
    watched.look()
    assert watched.path == ""

    written = tmp_path / part_name(1).replace(".json", "_4711.json")
    written.write_text(TRACE)
    watched.look()
    assert watched.path == str(written)
