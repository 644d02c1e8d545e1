"""The wall clock is set while a job runs: it is for people, and nothing that is counted or measured hangs on it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from bad_node import Refreshes

from gpulaunch.profiler.channel import clock
from gpulaunch.profiler.channel.quantities import CheckpointState

DAY_S = 86_400.0
COUNTED = ("steps", "samples", "phase", "step_duration", "gc", "checkpoint", "profiler_paired", "finding")
"""What is told of a rank by itself; the rest is what this process and this node do meanwhile."""


def counted(refreshes: Refreshes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    samples = refreshes.scrape().samples
    names = tuple(f"gpulaunch_{name}" for name in COUNTED)
    return {(each.name, frozenset(each.labels.items())): each.value for each in samples if each.name.startswith(names)}


@pytest.mark.parametrize("set_by_s", [0.0, DAY_S, -DAY_S, -60 * 365 * DAY_S])
def test_what_is_told_of_a_rank_is_the_same_whoever_sets_the_clock(tmp_path: Path, set_by_s: float) -> None:
    """Step by step beside a node whose clock is left alone: counters, ages, windows and what is found in them."""
    told = []
    for name, jump_s in (("left", 0.0), ("set", set_by_s)):
        (tmp_path / name).mkdir()
        refreshes = Refreshes(tmp_path / name)
        refreshes.writer.words[CheckpointState.saves] = 1
        refreshes.writer.words[CheckpointState.captured_ns] = refreshes.now.monotonic_ns
        seen = []
        for turn in range(20):
            if turn == 10:
                refreshes.pass_s(0.0, wall_s=jump_s)
            findings = refreshes.refresh().findings
            seen.append((counted(refreshes), [(each.rule, each.seconds_per_hour) for each in findings]))
        refreshes.close()
        told.append(seen)

    assert [rule for rule, _ in told[0][-1][1]] == ["gc-pauses"], "there is something to be lost"
    assert told[0][-1][0]["gpulaunch_checkpoint_age_seconds", frozenset()] == pytest.approx(40)
    assert told[0] == told[1]


def test_the_time_of_the_last_step_is_by_the_clock_as_it_is_set(tmp_path: Path) -> None:
    """So that `time() - it` is how long ago that was, before and after."""
    refreshes = Refreshes(tmp_path)
    ages = []
    for jump_s in (0.0, DAY_S, -2 * DAY_S):
        refreshes.pass_s(0.0, wall_s=jump_s)
        refreshes.refresh()
        refreshes.pass_s(7.0)
        refreshes.look()
        at_s = refreshes.scrape().value("gpulaunch_last_step_timestamp_seconds") or 0.0
        ages.append(refreshes.now.realtime_ns / 1e9 - at_s)
    refreshes.close()

    assert ages == pytest.approx([7.0] * 3, abs=0.002)


def test_an_anchor_carries_an_instant_over_with_the_clock_that_it_was_made_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock.time, "monotonic_ns", iter([1000, 1010]).__next__)
    monkeypatch.setattr(clock.time, "time_ns", lambda: 5_000_000)
    at = clock.anchor()

    assert (at.monotonic_ns, at.realtime_ns) == (1005, 5_000_000)
    assert clock.wall_ns(1105, at) == 5_000_100


# A rank whose program has been put into a time namespace of its own: its CLOCK_MONOTONIC is a day off.
ELSEWHERE = ("unshare", "--time", "--monotonic", "86400", "--boottime", "86400", "--fork", "--kill-child")


def may_shift_clocks() -> bool:
    try:
        return subprocess.run([*ELSEWHERE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.root
def test_a_rank_with_a_clock_of_its_own_is_counted_right(node) -> None:
    """Only when its last step was is not known: the day shows, and nothing else does."""
    if not may_shift_clocks():
        pytest.skip("no time namespaces here")
    node.start_sidecar()
    node.attempt(0, prefix=ELSEWHERE)
    node.ranks[0].tell("step 5")
    scrape = node.wait_for(5, "gpulaunch_steps_total")

    assert scrape.value("gpulaunch_phase_seconds_total") == pytest.approx(0.05)
    assert scrape.value("gpulaunch_step_duration_seconds_count") == 5
    assert not scrape.out_of_service & {"ranks", "process", "findings"}
