"""When a thread that keeps the GIL is told, which line of it, and when it is not why a step takes long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from healthy_node import HEALTHY_MS, gpu, gpu_memory, loader, rank, window
from rule_cases import two_ranks, watched_rank

from gpulaunch.profiler.analysis.advisor import Advisor, advise
from gpulaunch.profiler.analysis.window import RankWindow

WATCH = "train.py watch"


def alone(**changes: Any) -> RankWindow:
    """The watched rank without a dataloader's workers."""
    return watched_rank(**{"loader": loader(workers=0), **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, True),
        ({"gil_waits": {WATCH: 8}}, False),
        ({"samples": 400, "gil_waits": {WATCH: 36}}, False),
        ({"samples": 400, "gil_waits": {WATCH: 48}}, True),
        ({"samples": 19}, False),
        ({"thread_waits": 17}, False),
        ({"phases_ms": {"data_wait": 70.0}, "loader": loader(wait_ms=70.0)}, False),
        ({"gpu": gpu_memory()}, False),
    ],
    ids=[
        *("half of the samples", "few samples", "9 percent of many", "12 percent of many", "more than there are"),
        *("it waits for the thread besides", "it waits for its workers besides", "its GPU is busy"),
    ],
)
def test_a_thread_that_keeps_the_gil_is_told_if_the_training_would_be_faster_without(
    changes: dict[str, Any], told: bool
) -> None:
    found = [each.rule for each in advise(window(alone(**changes)))]

    assert ("gil-contention" in found) is told


def test_the_waits_for_a_gil_cost_at_most_what_a_gpu_is_idle() -> None:
    on_gpu = alone(gpu=gpu_memory())
    (found,) = advise(window(on_gpu, gpus=(gpu(utilization_ratio=0.7),)))

    assert (found.rule, found.evidence["gpu_idle_seconds_per_step"]) == ("gil-contention", pytest.approx(0.03))
    assert found.seconds_per_step == pytest.approx(0.03)
    assert advise(window(on_gpu, gpus=())) == (), "how long its GPU is idle is not known"


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ({"a.py:50": 20, "a.py:20": 19, "a.py:5": 8, "a.py:6": 9}, 20),
        ({"a.py:50": 20, "a.py:20": 12, "a.py:21": 8}, 50),
        ({"a.py:50": 12, "a.py:51": 8}, 50),
        ({"a.py:50": 9, "a.py:51": 9, "a.py:52": 2}, 50),
        ({"a.py:50": 20, "a.py:20": 20, "a.py:5": 20}, 5),
    ],
    ids=["what it calls", "spread over what it calls", "two lines of it", "lines that do not call each other", "chain"],
)
def test_the_line_is_the_innermost_that_has_nearly_all_of_the_largest(lines: dict[str, int], line: int) -> None:
    seen = {(WATCH, ""): 20, **{(WATCH, each): count for each, count in lines.items()}, ("b.py f", "b.py:1"): 30}

    (found,) = advise(window(alone(gil_lines=seen, calls={f"a.py:{line}": "statistics.quantiles"})))

    assert (found.file, found.line, found.subject) == ("a.py", line, "")
    assert (found.evidence["thread"], found.evidence["call"]) == (WATCH, "statistics.quantiles")
    assert found.evidence["line_ratio"] == lines[f"a.py:{line}"] / 20


def test_of_a_thread_that_more_samples_show_at_another_line_that_one_is_told() -> None:
    """The first window showed nearly all of its samples at the inner line; it would stand for three more."""
    advisor = Advisor()
    inner = {(WATCH, ""): 20, (WATCH, "a.py:50"): 20, (WATCH, "a.py:20"): 17}
    (first,) = advisor.add_window(window(alone(gil_lines=inner)))
    outer = {(WATCH, ""): 80, (WATCH, "a.py:50"): 80, (WATCH, "a.py:20"): 60}
    (second,) = advisor.add_window(window(alone(gil_lines=outer, samples=160, gil_waits={WATCH: 80})))

    assert (first.line, second.line) == (20, 50)


def test_a_thread_of_a_package_is_told_by_its_function() -> None:
    name = "tracker.worker.run"

    (found,) = advise(window(alone(gil_waits={name: 20}, gil_lines={(name, ""): 20})))

    assert (found.rule, found.file, found.line, found.subject) == ("gil-contention", None, None, name)


def test_ranks_with_the_same_thread_have_one_finding() -> None:
    (found,) = advise(window(alone(rank=0), alone(rank=1)))

    assert (found.rule, found.ranks) == ("gil-contention", (0, 1))


def test_a_rank_that_is_late_because_of_its_thread_is_told_by_the_thread() -> None:
    """Rank 0 has the dashboard. It waits for the GIL wherever torch has released it: it seems to compute longer."""
    seen = two_ranks({"forward": HEALTHY_MS["forward"] + 30.0})
    late = {"gil_waits": {WATCH: 40}, "samples": 120, "gil_lines": {(WATCH, ""): 40, (WATCH, "train.py:88"): 40}}
    ranks = tuple(replace(each, gpu=None, **late) if each.rank == 1 else replace(each, gpu=None) for each in seen.ranks)

    (found,) = advise(replace(seen, ranks=ranks))

    assert (found.rule, found.ranks) == ("gil-contention", (1,))
    assert found.advice.endswith(" Only rank 1 does it, and the other ranks wait for it.")
    assert [each.rule for each in advise(replace(seen, ranks=(ranks[0], replace(ranks[1], gil_waits={}))))] == [
        "straggler"
    ]


def test_what_was_repaired_is_silent() -> None:
    assert advise(window(rank(gpu=None, thread_waits=0))) == ()
