"""The most memory that a rank ever had: a curve has means, and an attempt that is gone takes its peaks along."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from kept_run import MIB, state
from runs_on_disk import NOW_S, begin, end, keep, write

from gpulaunch.exporters.view.load import load_run
from gpulaunch.profiler.record import NodeState


def holding(at_s: float, size_mib: int) -> NodeState:
    """What is seen of ranks that hold so much memory."""
    seen = state(at_s)
    return replace(
        seen,
        processes=tuple(
            replace(each, usage={role: replace(usage, rss_bytes=size_mib * MIB) for role, usage in each.usage.items()})
            for each in seen.processes
        ),
    )


def with_peak(at_s: float, peak_mib: int, attempt: int) -> NodeState:
    """What is seen of ranks of which torch says how much of their GPU they had at most, in this attempt."""
    seen = state(at_s, gpu=True, attempt=attempt)
    return replace(
        seen,
        training=tuple(
            replace(each, gpu=replace(each.gpu, peak_allocated_bytes=peak_mib * MIB))
            for each in seen.training
            if each.gpu is not None
        ),
    )


def kept(run_dir: Path, states: Iterable[NodeState], seconds: int) -> Path:
    begin(run_dir)
    keep(run_dir, states)
    end(run_dir, seconds)
    return run_dir


def test_what_lasted_three_seconds_of_twenty_minutes_is_the_most_all_the_same(tmp_path: Path) -> None:
    run_dir = kept(
        tmp_path / "run", (holding(at_s, 2000 if 300 <= at_s < 303 else 300) for at_s in range(1, 1201)), 1201
    )

    rank = load_run(run_dir, now_s=NOW_S).ranks[0]

    assert max(value or 0.0 for value in rank.rss_bytes["trainer"]) < 1500 * MIB  # the mean of 7 s or so
    assert rank.most_bytes == {"trainer": 2000 * MIB}


@pytest.mark.parametrize("second", [900, 901, 902])
def test_so_is_what_lasted_one_second_of_the_last_ten_minutes(tmp_path: Path, second: int) -> None:
    """Of them every second is kept, which are more than a curve has points for: of its rows some are left out."""
    run_dir = kept(tmp_path / "run", (holding(at_s, 2000 if at_s == second else 300) for at_s in range(1, 1201)), 1201)

    assert load_run(run_dir, now_s=NOW_S).ranks[0].most_bytes == {"trainer": 2000 * MIB}


def test_the_peak_of_an_attempt_is_not_gone_with_it(tmp_path: Path) -> None:
    """Rank 0 had 90 MiB of its GPU, and failed; torch counts from 0 in the next attempt."""
    before = [with_peak(at_s, 90, 0) for at_s in range(1, 40)]
    after = [with_peak(at_s, 5, 1) for at_s in range(50, 90)]
    run_dir = kept(tmp_path / "run", [*before, *after], 90)

    rank = load_run(run_dir, now_s=NOW_S).ranks[0]

    assert rank.memory.gpu_bytes["peak_allocated"] == 5 * MIB
    assert rank.most_bytes["allocated"] == 90 * MIB
    assert rank.most_bytes["reserved"] == 4 * MIB


def test_the_sum_at_the_end_knows_what_was_between_two_looks(tmp_path: Path) -> None:
    run_dir = kept(tmp_path / "run", (state(at_s, gpu=True) for at_s in range(1, 60)), 60)
    of_a_rank = {"steps": 1, "step_seconds": 0.1, "phase_seconds": {}}
    told = {
        "0": {**of_a_rank, "max_rss_bytes": 999 * MIB, "gpu_peak_allocated_bytes": 70 * MIB},
        "1": {**of_a_rank, "max_rss_bytes": 1, "gpu_peak_allocated_bytes": None},
    }
    write(run_dir, "summary.json", {"version": 1, "exit_code": 0, "error": "", "ranks": told})

    first, second = load_run(run_dir, now_s=NOW_S).ranks

    assert (first.most_bytes["trainer"], first.most_bytes["allocated"]) == (999 * MIB, 70 * MIB)
    assert (second.most_bytes["trainer"] > 300 * MIB, second.most_bytes["allocated"]) == (True, 3 * MIB)


def test_of_a_run_that_nobody_watched_it_is_what_its_agent_saw(tmp_path: Path) -> None:
    begin(tmp_path / "run")
    end(tmp_path / "run", 60)
    told = {"0": {"max_rss_bytes": 300 * MIB}}
    write(tmp_path / "run", "summary.json", {"version": 1, "exit_code": 0, "error": "", "ranks": told})

    assert load_run(tmp_path / "run", now_s=NOW_S).ranks[0].most_bytes == {"trainer": 300 * MIB}
