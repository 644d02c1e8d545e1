"""The watch over histories with a clock of their own: who is looked at, when, and who is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.hang.values import Limits, RankProgress
from gpulaunch.launcher.hang.watch import RankSnapshot, Watch
from gpulaunch.profiler.channel.layout import Region

LIMITS = Limits()
START_S = 1000.0
TRAINS = RankSnapshot(
    rank=0, pid=7, state="S", armed=True, begun=True, armed_s=START_S, edge_s=START_S, region=Region.BACKWARD, steps=5
)


def run(
    watch: Watch, seconds: float, look_at: Callable[[float], RankSnapshot], *, from_s: float = START_S
) -> list[RankProgress]:
    """Tick once a second; how the rank stood whenever it was worth a closer look."""
    found = [watch.tick(from_s + second, [look_at(from_s + second)]) for second in range(1, int(seconds) + 1)]
    return [standings[0] for standings in found if standings]


def report_after_s(found: list[RankProgress]) -> float:
    """From which quiet time on it is beyond its allowance."""
    return next(one.quiet_s for one in found if one.quiet_s >= one.allowed_s)


def stands_still(look: RankSnapshot) -> Callable[[float], RankSnapshot]:
    return lambda _: look


def test_a_rank_that_steps_is_never_suspected() -> None:
    watch = Watch(LIMITS)

    assert run(watch, 300, lambda now_s: replace(TRAINS, edge_s=now_s - 0.1, steps=int(now_s))) == []


def test_a_rank_that_stands_still_is_looked_at_at_the_floor() -> None:
    found = run(Watch(LIMITS), 30, stands_still(TRAINS))

    assert found[0].quiet_s == LIMITS.floor_s


@pytest.mark.parametrize("region", [Region.LOADER, Region.BACKWARD, Region.OTHER, Region.VALIDATION])
@pytest.mark.parametrize(("longest_s", "least_s", "most_s"), [(0, 30, 30), (3, 30, 30), (9, 40, 45), (20, 60, 60)])
def test_the_allowance_is_learnt_from_what_the_region_took(
    region: Region, longest_s: int, least_s: float, most_s: float
) -> None:
    """Five times the longest, 30 to 60 s, between steps as well."""
    watch, rank = Watch(LIMITS), replace(TRAINS, region=region)
    run(watch, longest_s, stands_still(rank))
    moved = replace(rank, edge_s=START_S + longest_s + 0.5, steps=6)

    found = run(watch, 120, stands_still(moved), from_s=START_S + longest_s + 1)

    assert least_s <= report_after_s(found) <= most_s + 1


def test_what_took_longer_and_went_on_is_not_told_again_at_once() -> None:
    """A validation of 200 s after each epoch is told of after 30 s in the first, then after 2 minutes."""
    watch, rests = Watch(LIMITS), replace(TRAINS, region=Region.OTHER)
    assert report_after_s(run(watch, 200, stands_still(rests))) == 30
    moved = replace(rests, edge_s=START_S + 200.5, steps=6)

    found = run(watch, 600, stands_still(moved), from_s=START_S + 201)

    assert report_after_s(found) // 1 == LIMITS.told_patiently_s, "and never later than what is named after a pause"


@pytest.mark.parametrize(
    ("look", "after_s"),
    [
        (replace(TRAINS, begun=False), 120),
        (replace(TRAINS, begun=False, region=Region.NONE, edge_s=0.0), 120),
        (replace(TRAINS, saving=True), 120),
    ],
)
def test_a_save_and_the_first_step_are_told_of_later(look: RankSnapshot, after_s: float) -> None:
    """They are looked at before, because a deadlock can be anywhere."""
    found = run(Watch(LIMITS), 150, stands_still(look))

    assert found[0].quiet_s == LIMITS.floor_s
    assert report_after_s(found) == after_s


def test_with_a_short_timeout_it_is_told_before_it_is_acted_on() -> None:
    limits = Limits(timeout_s=20, first_step_s=30)

    assert report_after_s(run(Watch(limits), 30, stands_still(TRAINS))) == 10
    assert report_after_s(run(Watch(limits), 30, stands_still(replace(TRAINS, saving=True)))) == 10
    assert report_after_s(run(Watch(limits), 30, stands_still(replace(TRAINS, begun=False)))) == 15


def test_a_program_without_a_probe_is_never_judged_by_time() -> None:
    assert run(Watch(LIMITS), 5000, stands_still(RankSnapshot(rank=0, pid=7, state="S"))) == []


@pytest.mark.parametrize("armed", [True, False])
def test_a_stopped_rank_is_suspected_within_seconds(armed: bool) -> None:
    found = run(Watch(LIMITS), 10, stands_still(replace(TRAINS, armed=armed, state="T")))

    assert 3 <= found[0].stopped_s <= 4


def test_a_rank_that_is_stopped_for_a_moment_is_not() -> None:
    def now_and_then(now_s: float) -> RankSnapshot:
        return replace(TRAINS, edge_s=now_s, state="T" if int(now_s) % 3 else "S")

    assert run(Watch(LIMITS), 60, now_and_then) == []


def test_a_stop_teaches_nothing() -> None:
    """A minute in state T does not make a minute in the backward normal."""
    watch = Watch(LIMITS)
    run(watch, 60, stands_still(replace(TRAINS, state="T")))

    found = run(watch, 20, stands_still(replace(TRAINS, edge_s=START_S + 61)), from_s=START_S + 61)

    assert found[0].allowed_s == LIMITS.told_s


def test_the_first_step_teaches_nothing() -> None:
    """It compiles; the next ones do not."""
    watch = Watch(LIMITS)
    run(watch, 60, stands_still(replace(TRAINS, begun=False)))

    found = run(watch, 20, stands_still(replace(TRAINS, edge_s=START_S + 61)), from_s=START_S + 61)

    assert found[0].allowed_s == LIMITS.told_s


def test_moving_again_clears_the_suspicion() -> None:
    watch = Watch(LIMITS)
    assert run(watch, 20, stands_still(TRAINS))

    assert watch.tick(START_S + 21, [replace(TRAINS, edge_s=START_S + 20.9)]) == ()


def test_the_end_of_a_save_is_progress_without_an_edge() -> None:
    watch = Watch(LIMITS)
    run(watch, 20, stands_still(replace(TRAINS, region=Region.FORWARD, saving=True)))

    assert watch.tick(START_S + 21, [replace(TRAINS, region=Region.FORWARD)]) == ()


def test_after_a_pause_of_the_launcher_itself_every_rank_starts_anew() -> None:
    """The machine was suspended, or the agent stopped: the ranks may have been too."""
    watch = Watch(LIMITS)
    watch.tick(START_S + 1, [TRAINS])

    assert watch.tick(START_S + 500, [TRAINS]) == ()
    assert run(watch, 9, stands_still(TRAINS), from_s=START_S + 500) == []
    assert run(watch, 9, stands_still(TRAINS), from_s=START_S + 509) != []


def test_a_new_process_of_a_rank_is_a_new_rank() -> None:
    watch = Watch(LIMITS)
    run(watch, 20, stands_still(TRAINS))

    assert watch.tick(START_S + 21, [replace(TRAINS, pid=8, edge_s=0.0, armed=False)]) == ()


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Region)), st.floats(0.05, 9.0)),
        min_size=1,
        max_size=60,
    )
)
def test_progress_within_the_floor_is_never_suspected(intervals: list[tuple[Region, float]]) -> None:
    watch, edge_s, now_s, steps = Watch(LIMITS), START_S, START_S, 0
    for region, interval_s in intervals:
        look = replace(TRAINS, region=region, edge_s=edge_s, steps=steps)
        while now_s < edge_s + interval_s:
            assert watch.tick(now_s, [look]) == ()
            now_s += 1.0
        edge_s += interval_s
        steps += 1
