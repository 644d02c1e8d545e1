"""The line that one rank alone runs while the others wait for it, and what only seems to be one. 0.1 s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from healthy_node import HEALTHY_MS, rank, window

from gpulaunch.profiler.analysis.advisor import advise
from gpulaunch.profiler.analysis.one_rank_lines import lines_of_one_rank
from gpulaunch.profiler.analysis.window import RankWindow, Window

DRAWS = "train.py:90"
LATE_MS = 7.0


def on_a_cpu(number: int, *, calling: Mapping[str, int], **phases_ms: float) -> RankWindow:
    return rank(number, gpu=None, facts={}, samples=100, calling=calling, phases_ms=phases_ms)


def one_draws(**changes: Any) -> Window:
    """Rank 0 draws pictures after its steps, and rank 1 waits for it in backward."""
    late = {"calling": {DRAWS: 7}, "other": HEALTHY_MS["other"] + LATE_MS}
    waits: dict[str, Any] = {"calling": {}, "backward": HEALTHY_MS["backward"] + LATE_MS}
    for key, value in changes.items():
        of, _, what = key.partition("_")
        (late if of == "late" else waits)[what] = value
    return window(on_a_cpu(0, **late), on_a_cpu(1, **waits), gpus=())


def test_seven_of_a_hundred_samples_are_enough_as_the_others_are_measured_to_wait() -> None:
    (found,) = lines_of_one_rank(one_draws())

    assert (found.rank, found.place.file, found.place.line) == (0, "train.py", 90)
    assert found.seconds_per_step == pytest.approx(LATE_MS / 1e3)
    assert found.advice.endswith("Only rank 0 does it, and the other ranks wait for it.")
    assert [(each.rule, each.line) for each in advise(one_draws())] == [("hot-line", 90)]


@pytest.mark.parametrize(
    "other",
    [
        {"late_calling": {DRAWS: 5}},
        {"waits_calling": {DRAWS: 1}},
        {"waits_backward": HEALTHY_MS["backward"] + 3.0},
        {"late_other": HEALTHY_MS["other"] + 4.0},
        {"late_other": HEALTHY_MS["other"] + 30.0, "waits_backward": HEALTHY_MS["backward"] + 30.0},
        {"late_other": HEALTHY_MS["other"], "late_optimizer": HEALTHY_MS["optimizer"] + LATE_MS},
    ],
    ids=["few samples", "others run it", "they do not wait", "small", "most is elsewhere", "the optimizer is why"],
)
def test_it_is_why_the_others_wait(other: dict[str, Any]) -> None:
    assert list(lines_of_one_rank(one_draws(**other))) == []


def test_on_a_gpu_it_may_be_where_this_rank_waits_for_that() -> None:
    ms = {"other": HEALTHY_MS["other"] + LATE_MS}, {"backward": HEALTHY_MS["backward"] + LATE_MS}
    ranks = [rank(n, samples=100, calling={DRAWS: 7} if n == 0 else {}, phases_ms=ms[n]) for n in range(2)]
    assert list(lines_of_one_rank(window(*ranks))) == []


def test_ranks_with_models_of_their_own_differ_in_what_they_run() -> None:
    """A learner beside those that play."""
    learner, player = one_draws().ranks
    of_other_sizes = [
        rank(
            each.rank,
            gpu=None,
            samples=100,
            calling=each.calling,
            facts={"gradients": {"elements": elements}},
            phases_ms={phase: ns / 1e6 / each.steps for phase, ns in each.phase_ns.items()},
        )
        for each, elements in ((learner, 1_000_000), (player, 10_000))
    ]
    assert list(lines_of_one_rank(window(*of_other_sizes, gpus=()))) == []


def test_a_line_with_samples_enough_is_told_once() -> None:
    told = [each for each in advise(one_draws(late_calling={DRAWS: 60}, late_other=HEALTHY_MS["other"] + 60.0))]
    assert [(each.rule, each.line) for each in told if each.rule == "hot-line"] == [("hot-line", 90)]
