"""What the agent says of its run, read as the sidecar reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.record import GOODPUT_BUCKETS, RESTART_KINDS, RunState
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.run import RunSampler, parse_run

S = 1_000_000_000


def document(**more: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "run_id": "0123456789abcdef",
        "attempt": 2,
        "restarts": {"segfault": 1},
        "goodput_seconds": dict.fromkeys(GOODPUT_BUCKETS, 1.5),
        "hang_suspicions": 2,
        "hangs": 1,
        "resumed_step": None,
        "preempted": 0,
        **more,
    }


class Run:
    """The agent's side of run.json, and the sidecar's."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "run.json"
        self.ledger = MonotonicTotals()
        self.sampler = RunSampler(directory, self.ledger)

    def says(self, **more: Any) -> RunState:
        self.path.write_text(json.dumps(document(**more)))
        reading = self.sampler.read(0.0)
        assert reading.errors == ()
        assert reading.values is not None
        return reading.values


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_before_the_agent_has_said_anything_there_is_nothing_and_no_error(run: Run) -> None:
    reading = run.sampler.read(0.0)
    assert (reading.values, reading.errors, reading.absent) == (None, (), "")


def test_what_the_agent_says_is_read(run: Run) -> None:
    state = run.says(restarts={"segfault": 2, "hang": 1}, preempted=1)
    assert state.goodput_ns == dict.fromkeys(GOODPUT_BUCKETS, 1_500_000_000)
    assert state.restarts == {"segfault": 2, "hang": 1}
    assert (state.hang_suspicions, state.hangs, state.preempted) == (2, 1, True)
    assert state.stalled_since_ns == {}


def test_ranks_that_stand_still_are_told_until_they_move(run: Run) -> None:
    stall = {"ranks": [1, 3], "since_s": 12.5, "due_s": None, "what": "ranks 1,3 are in data.py:31 sleep()"}
    assert run.says(stall=stall).stalled_since_ns == {1: 12.5 * S, 3: 12.5 * S}
    assert run.says(stall=None).stalled_since_ns == {}


def test_steps_that_must_be_done_again_stop_the_count_until_they_are_made_up_for(run: Run) -> None:
    """The agent takes 40 s back from productive; a counter must not."""
    told = [
        run.says(goodput_seconds={"productive": productive_s, "lost_work": lost_s}).goodput_ns
        for productive_s, lost_s in ((100, 0), (60, 40), (90, 40), (130.5, 40))
    ]
    assert [goodput["productive"] for goodput in told] == [100 * S, 100 * S, 100 * S, 130.5 * S]
    assert [goodput["lost_work"] for goodput in told] == [0, 40 * S, 40 * S, 40 * S]


def test_time_that_turns_out_to_have_been_work_is_not_told_a_second_time(run: Run) -> None:
    """A program that never imports torch: only its end tells that it was at work, and not starting, for 50 s."""
    for seconds, productive_s in (
        ({"startup": 60}, 0),
        ({"startup": 10, "productive": 50}, 0),
        ({"startup": 10, "productive": 55}, 5),
        ({"startup": 10, "productive": 55, "restart": 20}, 5),
        ({"startup": 10, "productive": 62, "restart": 18}, 10),
    ):
        goodput = run.says(goodput_seconds=seconds).goodput_ns
        assert goodput["productive"] == productive_s * S
        assert sum(goodput.values()) == sum(seconds.values()) * S
        assert goodput["startup"] == 60 * S


def test_no_count_falls_when_the_sidecar_is_replaced(run: Run, tmp_path: Path) -> None:
    run.says(restarts={"segfault": 3}, hangs=5, goodput_seconds={"productive": 100})
    run.ledger.save(tmp_path / "sidecar.json")
    successor = Run(tmp_path)
    assert successor.ledger.load(tmp_path / "sidecar.json")
    state = successor.says(restarts={"segfault": 2}, hangs=4, goodput_seconds={"productive": 60})
    assert (state.restarts, state.hangs, state.goodput_ns["productive"]) == ({"segfault": 3}, 5, 100 * S)


def test_kinds_and_buckets_of_another_agent_do_no_harm(run: Run) -> None:
    state = run.says(restarts={"cosmic_ray": 2, "gremlin": 1, "hang": 1}, goodput_seconds={"siesta": 5, "startup": 1})
    assert state.restarts == {"other": 3, "hang": 1}
    assert state.goodput_ns == {**dict.fromkeys(GOODPUT_BUCKETS, 0), "startup": S}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ('{"version": 1, "run_id": "x", "restarts": {', "Expecting"),
        ('{"version": 2}', "version 2, this sidecar knows 1"),
        ('{"version": 1}', "damaged"),
        ("[]", "damaged"),
        (json.dumps(document(hangs=-1)), "not a count"),
        (json.dumps(document(hangs=True)), "not a count"),
        (json.dumps(document(restarts={"hang": 1.5})), "not a count"),
        (json.dumps(document(restarts=[])), "damaged"),
        (json.dumps(document(goodput_seconds={"startup": -0.5})), "not a number of seconds"),
        (json.dumps(document(goodput_seconds={"startup": float("nan")})), "not a number of seconds"),
        (json.dumps(document(goodput_seconds={"startup": 1e300})), "not a number of seconds"),
        ("[" * 100_000, "damaged"),
    ],
)
def test_what_is_not_whole_is_told_and_gives_nothing(run: Run, text: str, why: str) -> None:
    run.says()
    run.path.write_text(text)
    reading = run.sampler.read(0.0)
    assert reading.values is None
    assert len(reading.errors) == 1
    assert reading.errors[0].startswith("run.json: ")
    assert why in reading.errors[0]
    assert run.says().hangs == 1


def test_a_file_that_cannot_be_read_is_told(run: Run) -> None:
    run.path.mkdir()
    assert run.sampler.read(0.0).errors == ("run.json: Is a directory",)


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(GOODPUT_BUCKETS), inner),
)
runs = st.fixed_dictionaries(
    {
        "version": st.just(1),
        "restarts": documents | st.dictionaries(st.sampled_from(RESTART_KINDS) | st.text(), st.integers()),
        "goodput_seconds": documents | st.dictionaries(st.sampled_from(GOODPUT_BUCKETS), st.floats() | st.integers()),
        "hang_suspicions": st.integers(),
        "hangs": st.integers(),
        "preempted": st.integers(0, 1),
    }
)


@given(st.binary() | (documents | runs).map(lambda document: json.dumps(document).encode()))
def test_a_run_is_read_whole_or_refused(text: bytes) -> None:
    try:
        state = parse_run(text)
    except ValueError:
        return
    assert set(state.goodput_ns) == set(GOODPUT_BUCKETS)
    assert set(state.restarts) <= set(RESTART_KINDS)
    assert min(*state.goodput_ns.values(), *state.restarts.values(), state.hangs, 0) == 0
