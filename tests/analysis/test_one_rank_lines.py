"""The line that one rank alone runs while the others wait for it, and what only seems to be one. 0.1 s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from healthy_node import HEALTHY_MS, STEPS, rank, window

from gpulaunch.profiler.analysis.advisor import advise
from gpulaunch.profiler.analysis.one_rank_lines import lines_of_one_rank
from gpulaunch.profiler.analysis.window import RankWindow, Window

DRAWS = "train.py:90"
LATE_MS = 7.0


def on_a_cpu(number: int, *, calling: Mapping[str, int], works: float, **phases_ms: float) -> RankWindow:
    main_thread_s = works / 1e3 * STEPS
    own = {"gpu": None, "facts": {}, "samples": 100, "main_thread_s": main_thread_s}
    return rank(number, calling=calling, phases_ms=phases_ms, **own)


def one_draws(**changes: Any) -> Window:
    """Rank 0 draws pictures after its steps, and rank 1 waits for it in backward."""
    late: dict[str, Any] = {"calling": {DRAWS: 7}, "works": 90.0 + LATE_MS, "other": HEALTHY_MS["other"] + LATE_MS}
    waits: dict[str, Any] = {"calling": {}, "works": 90.0, "backward": HEALTHY_MS["backward"] + LATE_MS}
    for key, value in changes.items():
        of, _, what = key.partition("_")
        (late if of == "late" else waits)[what] = value
    return window(on_a_cpu(0, **late), on_a_cpu(1, **waits), gpus=())


def test_seven_of_a_hundred_samples_are_enough_as_the_others_are_measured_to_wait() -> None:
    (found,) = lines_of_one_rank(one_draws())

    assert (found.rank, found.place.file, found.place.line) == (0, "train.py", 90)
    assert found.seconds_per_step == pytest.approx(0.07 * one_draws().ranks[0].step_s)
    assert found.advice.endswith("Only rank 0 does it, and the other ranks wait for it.")
    assert [(each.rule, each.line) for each in advise(one_draws())] == [("hot-line", 90)]


@pytest.mark.parametrize(
    "other",
    [
        {"late_calling": {DRAWS: 5}},
        {"waits_calling": {DRAWS: 1}},
        {"waits_backward": HEALTHY_MS["backward"] + 3.0},
        {"waits_works": 90.0 + LATE_MS},
        {"late_other": HEALTHY_MS["other"] + 3.0},
        {"late_calling": {DRAWS: 20}},
        {"late_other": HEALTHY_MS["other"] + 30.0, "waits_backward": HEALTHY_MS["backward"] + 30.0},
        {"late_other": HEALTHY_MS["other"], "late_optimizer": HEALTHY_MS["optimizer"] + LATE_MS},
    ],
    ids=[
        *("few samples", "others run it", "they do not wait", "they work as long", "hardly late"),
        *("less late than that", "later than that", "the optimizer is why"),
    ],
)
def test_it_is_why_the_others_wait(other: dict[str, Any]) -> None:
    assert list(lines_of_one_rank(one_draws(**other))) == []


def test_counts_that_were_read_a_moment_apart_say_nothing() -> None:
    ranks = [replace(each, samples=0) for each in one_draws().ranks]
    assert list(lines_of_one_rank(window(*ranks, gpus=()))) == []


def test_on_a_gpu_it_may_be_where_this_rank_waits_for_that() -> None:
    ranks = [replace(each, gpu=rank().gpu) for each in one_draws().ranks]
    assert list(lines_of_one_rank(window(*ranks, gpus=()))) == []


@pytest.mark.parametrize("elements", [(1_000_000, 10_000), (1_000_000, None)], ids=["of other sizes", "one has none"])
def test_ranks_with_models_of_their_own_differ_in_what_they_run(elements: tuple[int, int | None]) -> None:
    """A learner beside those that play."""

    def pair(*sizes: int | None) -> Window:
        facts = [{"gradients": {"elements": each}} if each else {} for each in sizes]
        return window(*(replace(each, facts=of) for each, of in zip(one_draws().ranks, facts, strict=True)), gpus=())

    assert list(lines_of_one_rank(pair(*elements))) == []
    assert len(list(lines_of_one_rank(pair(1_000_000, 1_000_000)))) == 1


def test_a_line_with_samples_enough_is_told_once() -> None:
    told = advise(one_draws(late_calling={DRAWS: 40}, late_other=HEALTHY_MS["other"] + 60.0))
    assert [(each.rule, each.line) for each in told if each.rule == "hot-line"] == [("hot-line", 90)]
