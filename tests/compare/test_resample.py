"""Runs of very different length, and steps longer than an interval: what is judged is of equally long stretches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from recordings import recorded

from gpulaunch.exporters.report.compare import Change, Comparison, compare
from gpulaunch.exporters.report.compared import verdict
from gpulaunch.exporters.view.model import RunView
from gpulaunch.exporters.view.rank_model import RankView

MOST_POINTS = 180


def run_of(seconds: int, steps: Iterator[tuple[float, float]], *, begin_s: float = 0.0) -> RunView:
    """What a view has of a run of so many seconds: each step takes some time, and saves for some of it."""
    points = min(MOST_POINTS, seconds)
    interval_s = seconds / points
    made, took_s, saved_s = [0] * points, [0.0] * points, [0.0] * points
    at_s = begin_s
    for took, saved in steps:
        at_s += took
        if at_s >= seconds:
            break
        index = int(at_s / interval_s)
        made[index] += 1
        took_s[index] += took
        saved_s[index] += saved

    def by(above: list[float], below: list[int] | list[float]) -> tuple[float | None, ...]:
        return tuple(one / other if other else None for one, other in zip(above, below, strict=True))

    saving = by(saved_s, took_s)
    return replace(
        recorded("calm").view,
        nodes=(),
        ranks=(),
        times_s=tuple(interval_s * (index + 1) for index in range(points)),
        interval_seconds=interval_s,
        steps_per_second=tuple(each / interval_s for each in made),
        samples_per_second=(),
        step_mean_seconds=by(took_s, made),
        phase_ratios={
            "forward": tuple(None if share is None else 1 - share for share in saving),
            "checkpoint": saving,
        },
    )


def steps_of(
    length_s: float, *, save_every_s: float = 0.0, save_s: float = 0.0, seed: int = 0
) -> Iterator[tuple[float, float]]:
    """Steps that differ by a few per cent, and save now and then."""
    chance = random.Random(seed)
    since_s = 0.0
    while True:
        took = length_s * chance.gauss(1, 0.03)
        saved = save_s if save_every_s and since_s >= save_every_s else 0.0
        since_s = 0.0 if saved else since_s + took
        yield took + saved, saved


def of(found: Comparison, name: str) -> Change:
    return next(change for change in found.changes if change.name == name)


def told(found: Comparison) -> list[str]:
    return [change.name for change in found.changes if change.told == "changed"]


@pytest.mark.parametrize("seconds", [180, 300, 1800])
def test_steps_longer_than_an_interval_have_the_rate_that_they_have(seconds: int) -> None:
    """Of three minutes an interval is a second: in most of them no step of 5 s ends, and they count all the same."""
    found = compare(run_of(seconds, steps_of(5.0, seed=1)), run_of(1800, steps_of(5.0, seed=2)))

    rate = of(found, "steps a second")
    assert (rate.a, rate.b) == (pytest.approx(0.2, rel=0.05), pytest.approx(0.2, rel=0.05))
    assert told(found) == []
    assert (rate.told, of(found, "step time").told) == ("noise", "noise")


def test_ranks_that_end_their_steps_in_different_intervals_are_no_slower_for_it() -> None:
    """In each second there is a rank that ended none, but none of them ever stood still."""
    first, second = (run_of(180, steps_of(5.0), begin_s=begin_s) for begin_s in (0.0, 1.0))
    ranks = tuple(
        RankView(rank=rank, steps_per_second=each.steps_per_second, step_mean_seconds=each.step_mean_seconds)
        for rank, each in enumerate((first, second))
    )
    both = replace(
        first,
        ranks=ranks,
        steps_per_second=(0.0,) * len(first.times_s),
        step_mean_seconds=tuple(
            other if one is None else one
            for one, other in zip(first.step_mean_seconds, second.step_mean_seconds, strict=True)
        ),
    )

    rate = of(compare(first, both), "steps a second")

    assert (rate.told, rate.b) == ("noise", pytest.approx(0.2, rel=0.05))


def test_a_pause_that_no_step_took_is_none_of_its_rate() -> None:
    """Ten minutes in which nobody made a step, as over a restart: the program is as fast as it was."""
    run = run_of(1800, steps_of(0.1, seed=1))
    hours, pause = len(run.times_s), range(60, 120)
    paused = replace(
        run,
        steps_per_second=tuple(0.0 if at in pause else run.steps_per_second[at] for at in range(hours)),
        step_mean_seconds=tuple(None if at in pause else run.step_mean_seconds[at] for at in range(hours)),
    )

    found = compare(run, paused)

    assert of(found, "steps a second").b == pytest.approx(10.0, rel=0.05)
    assert told(found) == []


@pytest.mark.parametrize("seconds", [400, 1200, 3600])
def test_a_checkpoint_now_and_then_is_in_both_however_long_they_ran(seconds: int) -> None:
    """In most seconds of a short run nothing is saved, and in each minute of a long one something is."""
    every = {"save_every_s": 47.0, "save_s": 3.0}
    found = compare(run_of(seconds, steps_of(0.1, seed=1, **every)), run_of(9000, steps_of(0.1, seed=2, **every)))

    assert told(found) == []
    assert of(found, "checkpoint in a step").a == pytest.approx(0.0064, rel=0.2)


def test_a_run_that_is_too_short_for_the_other_says_so() -> None:
    """Three minutes have three stretches of 50 s: whatever differs, it cannot be told, and the note says why."""
    every = {"save_every_s": 47.0, "save_s": 3.0}
    found = compare(run_of(180, steps_of(0.1, seed=1, **every)), run_of(9000, steps_of(0.1, seed=2, **every)))

    assert of(found, "step time").told == "short"
    assert verdict(found).startswith("Too little to compare")
    assert [note.partition(": ")[2] for note in found.notes if "stretches" in note] == [
        "A has 3 of them, and 7 are needed"
    ]


def test_steps_whose_length_nobody_knows_are_not_compared() -> None:
    run = recorded("calm").view
    found = compare(run, replace(run, step_mean_seconds=(), phase_ratios={}))

    assert verdict(found).startswith("The steps of the two runs cannot be compared")


def test_slower_steps_are_told_though_one_ran_six_times_as_long() -> None:
    found = compare(
        run_of(600, steps_of(0.1, save_every_s=47.0, save_s=3.0, seed=1)),
        run_of(3600, steps_of(0.13, save_every_s=47.0, save_s=3.0, seed=2)),
    )

    assert of(found, "step time").told == of(found, "forward in a step").told == "changed"
    assert of(found, "forward in a step").ratio == pytest.approx(0.3, abs=0.02)
    assert of(found, "checkpoint in a step").told == "changed"  # it is of fewer steps


def test_equal_programs_are_hardly_ever_told_apart_whatever_their_lengths() -> None:
    """The negative control: short steps, long ones, and checkpoints, over minutes and hours."""
    kinds = [
        {"length_s": 0.1},
        {"length_s": 1.3},
        {"length_s": 5.0},
        {"length_s": 0.5, "save_every_s": 200.0, "save_s": 20.0},
        {"length_s": 0.5, "save_every_s": 60.0, "save_s": 10.0},
    ]
    lengths = [(240, 300), (300, 900), (600, 2400), (900, 1000)]
    wrong = [
        (kind, length, seed, told(found))
        for kind in kinds
        for length in lengths
        for seed in range(4)
        if told(
            found := compare(
                run_of(length[0], steps_of(**kind, seed=seed)), run_of(length[1], steps_of(**kind, seed=1000 + seed))
            )
        )
    ]

    assert len(wrong) <= 1, wrong
