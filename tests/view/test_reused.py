"""A run directory that was used before: what the earlier run left there is told as its own, and not as the newest's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kept_run import GC, SYNC, WALL_S, state
from runs_on_disk import NOW_S, begin, end, held, keep, write

from gpulaunch.exporters.files.findings import FindingsFile
from gpulaunch.exporters.view.live import view_of_state
from gpulaunch.exporters.view.load import load_run
from gpulaunch.exporters.view.model import FindingView, RunView, Status
from gpulaunch.profiler.kernel import kernel
from gpulaunch.profiler.record import NodeState

LATER_S = 200
OF_MANY_STEPS = {"0": {"steps": 100_000, "samples": 10**7, "step_seconds": 1e4, "phase_seconds": {"forward": 1e4}}}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def later(second: float, **more: Any) -> NodeState:
    """A state of the second run."""
    shift_ns = LATER_S * 10**9
    of_run = state(second, run_id="bbbb", **more)
    return replace(
        of_run,
        taken_monotonic_ns=of_run.taken_monotonic_ns + shift_ns,
        taken_wall_ns=of_run.taken_wall_ns + shift_ns,
    )


def load(run_dir: Path) -> RunView:
    return load_run(run_dir, now_s=NOW_S)


# -- what the earlier run summed up


@pytest.fixture(params=["its run is named", "of an older gpulaunch"])
def summed_up(run_dir: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A run that has ended, and another that goes on."""
    begin(run_dir)
    keep(run_dir, [state(second) for second in range(1, 60)])
    end(run_dir, 60, code=75)
    named = {"run_id": "aaaa"} if request.param == "its run is named" else {}
    write(run_dir, "summary.json", {"version": 1, **named, "exit_code": 75, "error": "", "ranks": OF_MANY_STEPS})
    begin(run_dir, run_id="bbbb", at_s=LATER_S)
    with held(run_dir):
        yield run_dir


def test_the_steps_of_a_run_that_goes_on_are_its_own(summed_up: Path) -> None:
    assert load(summed_up).steps == 0, "it has made none yet"

    keep(summed_up, [later(second) for second in range(1, 50)])

    for view in (load(summed_up), view_of_state(later(49), run_dir=summed_up)):
        assert (view.run_id, view.status, view.steps) == ("bbbb", Status.RUNNING, 490)
        assert [(rank.steps, rank.samples) for rank in view.ranks] == [(490, 15680)] * 2
        assert view.ranks[0].phase_seconds["forward"] == pytest.approx(36.75, abs=0.01)


def test_what_a_run_has_summed_up_itself_is_told(summed_up: Path) -> None:
    keep(summed_up, [later(second) for second in range(1, 50)])
    end(summed_up, LATER_S + 50)
    write(summed_up, "summary.json", {"version": 1, "run_id": "bbbb", "ranks": {"0": {"steps": 500}}})

    assert [rank.steps for rank in load(summed_up).ranks] == [500, 490], "with the steps since the last look"
    (summed_up / "events.jsonl").unlink()
    assert load(summed_up).steps == 500


# -- what the earlier run was told


@pytest.mark.parametrize("kept", ["telemetry.sqlite", "both"])
def test_what_a_finding_cost_an_earlier_run_is_no_cost_of_this_one(run_dir: Path, kept: str) -> None:
    """One stood in both, one only in the first: of what they cost, only the half of one is of the second."""
    begin(run_dir)
    file = FindingsFile(run_dir / "findings.jsonl")
    keep(run_dir, [state(second, findings=(SYNC, GC)) for second in range(1, 101)])
    file.tell((SYNC, GC), WALL_S + 100)
    begin(run_dir, run_id="bbbb", at_s=LATER_S)
    keep(run_dir, [later(second, findings=(SYNC,) if second > 10 else ()) for second in range(1, 51)])
    file.tell((SYNC,), WALL_S + LATER_S + 50)
    end(run_dir, LATER_S + 50)
    if kept != "both":
        (run_dir / "findings.jsonl").unlink()

    both, first = load(run_dir).findings

    assert (both.rule, both.active, both.earlier) == ("sync-every-step", True, False)
    assert both.lost_seconds == pytest.approx(40 * 720 / 3600), "and not the 20 s of the first run besides"
    assert both.first_seen_s == WALL_S + LATER_S + 11
    assert (first.rule, first.active, first.earlier, first.lost_seconds) == ("gc-pauses", False, True, None)


def test_where_the_second_run_is_not_watched_all_findings_are_of_the_first(run_dir: Path) -> None:
    begin(run_dir)
    keep(run_dir, [state(second, findings=(SYNC,)) for second in range(20)])
    begin(run_dir, run_id="bbbb", at_s=LATER_S)

    with held(run_dir):
        (found,) = load(run_dir).findings
    assert (found.earlier, found.active, found.lost_seconds) == (True, False, None)

    (run_dir / "events.jsonl").unlink()  # nobody says that there was a second one
    (found,) = load(run_dir).findings
    assert (found.earlier, found.active) == (False, True)
    assert found.lost_seconds == pytest.approx(19 * 720 / 3600)


def test_findings_of_another_node_are_of_the_run_in_which_they_were_seen(run_dir: Path) -> None:
    """Its own names of the runs are not those of the first node."""
    begin(run_dir)
    keep(run_dir, [state(second) for second in range(1, 20)])
    on_node = [state(second, run_id="of node 1", node=1, findings=(SYNC, GC)) for second in range(1, 20)]
    keep(run_dir / "node-1", on_node, channel="channel-1")

    def told() -> list[tuple[str, int, bool, bool]]:
        return [(each.rule, each.node, each.active, each.earlier) for each in load(run_dir).findings]

    assert told() == [("sync-every-step", 1, True, False), ("gc-pauses", 1, True, False)]
    begin(run_dir, run_id="bbbb", at_s=LATER_S)
    assert told() == [("sync-every-step", 1, False, True), ("gc-pauses", 1, False, True)]
    second = [later(second, node=1, findings=(GC,)) for second in range(1, 20)]
    keep(run_dir / "node-1", second, channel="channel-1")
    assert told() == [("gc-pauses", 1, True, False), ("sync-every-step", 1, False, True)]


def test_a_view_says_which_findings_are_of_an_earlier_run(run_dir: Path) -> None:
    """As JSON, too, and one that does not say it has none."""
    from gpulaunch.exporters.view.as_json import from_json, to_json

    begin(run_dir)
    keep(run_dir, [state(second, findings=(SYNC,)) for second in range(1, 20)])
    begin(run_dir, run_id="bbbb", at_s=LATER_S)
    document = json.loads(json.dumps(to_json(load(run_dir))))

    def earlier() -> list[bool]:
        found: tuple[FindingView, ...] = from_json(document).findings
        return [each.earlier for each in found]

    assert earlier() == [True]
    del document["findings"][0]["earlier"]
    assert earlier() == [False]


# -- nodes of the earlier run


@pytest.fixture
def two_nodes(run_dir: Path) -> Path:
    """A run of two nodes that has ended."""
    begin(run_dir)
    keep(run_dir, [state(second) for second in range(1, 60)])
    on_node = [state(second, ranks=(2, 3), node=1, run_id="of node 1", findings=(SYNC,)) for second in range(1, 60)]
    keep(run_dir / "node-1", on_node, channel="channel-1")
    end(run_dir, 60, code=75)
    return run_dir


def test_a_node_that_is_not_in_the_newest_run_is_not_shown_with_it(two_nodes: Path) -> None:
    assert [rank.rank for rank in load(two_nodes).ranks] == [0, 1, 2, 3]
    begin(two_nodes, run_id="bbbb", at_s=LATER_S)
    keep(two_nodes, [later(second) for second in range(1, 31)])

    with held(two_nodes):
        view = load(two_nodes)

    assert [(rank.rank, rank.node) for rank in view.ranks] == [(0, 0), (1, 0)]
    assert (view.steps, view.samples_per_second_now) == (300, pytest.approx(640.0))
    assert [node.node for node in view.nodes] == [0]
    assert [site.ranks for site in view.sites] == [(0, 1)]
    assert [(each.node, each.earlier) for each in view.findings] == [(1, True)], "it says itself when that was"
    (note,) = view.notes
    assert "node 1 is not in the newest run" in note


def test_a_node_that_joins_the_newest_run_late_is_shown_once_it_is_there(two_nodes: Path) -> None:
    begin(two_nodes, run_id="bbbb", at_s=LATER_S)
    keep(two_nodes, [later(second) for second in range(1, 31)])
    on_node = later(25, ranks=(2, 3), node=1)
    keep(two_nodes / "node-1", [on_node], channel="channel-1")

    with held(two_nodes):
        view = load(two_nodes)

    assert [(rank.rank, rank.steps) for rank in view.ranks] == [(0, 300), (1, 300), (2, 250), (3, 250)]
    assert view.notes == ()


def off(of_node: NodeState, by_s: float) -> NodeState:
    """As a node has it whose clock is ahead by so much."""
    return replace(of_node, taken_wall_ns=of_node.taken_wall_ns + round(by_s * 10**9))


def test_a_node_that_has_only_just_begun_is_of_the_newest_run_though_its_clock_is_behind(two_nodes: Path) -> None:
    """It seems to have been there for a moment, before the run began."""
    begin(two_nodes, run_id="bbbb", at_s=LATER_S)
    keep(two_nodes / "node-1", [off(later(1, ranks=(2, 3), node=1), -13)], channel="channel-1")

    assert [rank.rank for rank in load(two_nodes).ranks] == [2, 3]


def test_a_node_whose_clock_is_far_behind_is_of_the_newest_run_once_it_is_seen_since(two_nodes: Path) -> None:
    begin(two_nodes, run_id="bbbb", at_s=LATER_S)
    keep(two_nodes / "node-1", [off(later(s, ranks=(2, 3), node=1), -60) for s in range(1, 50)], channel="channel-1")
    assert load(two_nodes).ranks == (), "by its clock, it has ended before that began"

    keep(two_nodes / "node-1", [off(later(s, ranks=(2, 3), node=1), -60) for s in range(50, 61)], channel="channel-1")
    assert [rank.steps for rank in load(two_nodes).ranks] == [600, 600]


def test_a_node_whose_clock_is_ahead_is_not_of_a_run_that_follows_at_once(run_dir: Path) -> None:
    """It seems to have been there still as the next run began."""
    begin(run_dir)
    keep(run_dir, [state(second) for second in range(1, 60)])
    ahead = [off(state(second, ranks=(2, 3), node=1, run_id="of node 1"), 3) for second in range(1, 60)]
    keep(run_dir / "node-1", ahead, channel="channel-1")
    end(run_dir, 60, code=75)
    begin(run_dir, run_id="bbbb", at_s=60 + 11)

    assert load(run_dir).ranks == ()


def test_of_a_node_alone_the_totals_are_those_of_its_own_newest_run(run_dir: Path) -> None:
    """Its directory is looked into by itself, too."""
    begin(run_dir, run_id="of node 1")
    keep(run_dir, [state(second, node=1, run_id="of node 1") for second in range(1, 60)])
    end(run_dir, 60, code=75)
    begin(run_dir, run_id="bbbb", at_s=LATER_S)

    with held(run_dir):
        view = load(run_dir)

    assert (view.status, view.steps, view.ranks) == (Status.RUNNING, 0, ())


def test_a_run_of_one_node_after_one_of_several_is_the_newest(run_dir: Path) -> None:
    """The job of several is led by the node that is left of it: no longer."""
    for path in (run_dir, run_dir / "node-1"):
        begin(path, run_id=f"of {path.name}")
        with (path / "events.jsonl").open("a") as history:
            started = {
                "version": 1,
                "time_s": WALL_S + 1,
                "event": "started",
                "attempt": 0,
                "job": "j",
                "generation": 1,
            }
            history.write(json.dumps(started) + "\n")
    end(run_dir / "node-1", 60, code=75)
    assert load(run_dir).status is Status.FAILED

    begin(run_dir, run_id="bbbb", at_s=LATER_S)

    with held(run_dir):
        assert load(run_dir).status is Status.RUNNING


# -- how the earlier run ended


def test_a_run_that_was_killed_is_lost_however_the_next_one_stands(run_dir: Path) -> None:
    begin(run_dir)
    begin(run_dir, run_id="bbbb", at_s=LATER_S)
    lines = (run_dir / "events.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "events.jsonl").write_text("".join(lines[:5]))  # the second has only just begun

    with held(run_dir):
        view = load(run_dir)

    assert (view.run_id, view.status) == ("bbbb", Status.RUNNING)
    assert [(each.status, each.ended_s) for each in view.attempts] == [(Status.LOST, None)]


# -- where the launcher is


GONE = 2**22 + 1
"""No process has such a number."""


def stands(run_dir: Path, silent_s: float) -> Status:
    """How a run stands that has said nothing for so long."""
    heard_s = WALL_S + 19
    os.utime(run_dir / "events.jsonl", (heard_s, heard_s))
    return load_run(run_dir, now_s=heard_s + silent_s).status


@pytest.mark.parametrize("host", ["somewhere-else", ""])
def test_of_a_run_on_another_host_nobody_can_say_from_here_that_its_launcher_is_gone(run_dir: Path, host: str) -> None:
    """Without a profiler (--no-profile) nobody says anything for hours, and that is as it should be."""
    begin(run_dir, pid=GONE, host=host)

    assert stands(run_dir, 5.0) is Status.RUNNING
    assert stands(run_dir, 3600.0) is Status.UNKNOWN
    (note,) = (note for note in load_run(run_dir, now_s=2 * NOW_S).notes if "cannot be seen from here" in note)
    assert (host or "an unknown host") in note


def test_of_a_run_on_this_host_everybody_can(run_dir: Path) -> None:
    begin(run_dir, pid=GONE)
    assert stands(run_dir, 5.0) is Status.LOST

    begin(run_dir, run_id="bbbb", host="")  # of an older gpulaunch: its launcher is there to be seen
    with held(run_dir):
        assert stands(run_dir, 3600.0) is Status.RUNNING


def test_of_a_run_in_another_container_nobody_can_either_though_its_host_has_our_name(run_dir: Path) -> None:
    """Containers of a pod share their name; the pid of one is another process in the next, or none."""
    elsewhere = f"{kernel().partition(' ')[0]} pid:[1]"
    begin(run_dir, pid=GONE, kernel=elsewhere)
    assert stands(run_dir, 5.0) is Status.RUNNING
    assert stands(run_dir, 3600.0) is Status.UNKNOWN
    (note,) = (note for note in load_run(run_dir, now_s=2 * NOW_S).notes if "cannot be seen from here" in note)
    assert f"on {socket.gethostname()} (in another container" in note

    begin(run_dir, kernel=elsewhere)
    with held(run_dir):  # by a process of ours, which has the same number
        assert stands(run_dir, 3600.0) is Status.UNKNOWN


def test_what_was_silent_since_before_this_host_was_booted_is_lost(run_dir: Path) -> None:
    """Whatever process has its launcher's number today. Another host of the same name would go on to say something."""
    begin(run_dir, kernel=f"another {kernel().partition(' ')[2]}")
    with held(run_dir):
        assert stands(run_dir, 5.0) is Status.RUNNING
        assert stands(run_dir, 3600.0) is Status.LOST


def test_of_a_run_whose_pids_are_ours_everybody_can_whatever_its_host_is_called(run_dir: Path) -> None:
    begin(run_dir, pid=GONE, host="name-of-a-container", kernel=kernel())
    assert stands(run_dir, 5.0) is Status.LOST

    begin(run_dir, run_id="bbbb", host="name-of-a-container", kernel=kernel())
    with held(run_dir):
        assert stands(run_dir, 3600.0) is Status.RUNNING


LOOKS = """
import sys
from gpulaunch.exporters.view.load import load_run
print(load_run(sys.argv[1]).status.value)
"""


@pytest.mark.root
def test_a_run_goes_on_for_somebody_in_a_pid_namespace_of_his_own(run_dir: Path) -> None:
    """As in the container beside it: its launcher lives, and there is no such process."""
    own = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    try:
        asked = subprocess.run([*own, "true"], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if asked.returncode:
        pytest.skip(f"no pid namespaces of our own here: {asked.stderr.strip()}")
    begin(run_dir)

    with held(run_dir):
        seen = subprocess.run([*own, sys.executable, "-c", LOOKS, run_dir], capture_output=True, text=True, timeout=60)

    assert (seen.stdout, seen.stderr) == ("running\n", "")


def test_a_sidecar_that_falls_silent_is_gone_wherever_it_was(run_dir: Path) -> None:
    """It looks every second."""
    begin(run_dir, pid=GONE, host="somewhere-else")
    keep(run_dir, [state(second) for second in range(1, 20)])

    assert stands(run_dir, 5.0) is Status.RUNNING
    assert stands(run_dir, 3600.0) is Status.LOST
