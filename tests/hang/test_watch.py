"""The watch over histories with a clock of their own: who is looked at, when, and who is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.hang.values import TRAINING, Limits
from gpulaunch.launcher.hang.watch import Look, Suspicion, Watch
from gpulaunch.profiler.channel.layout import Region

LIMITS = Limits()
START_S = 1000.0
TRAINS = Look(
    rank=0, pid=7, state="S", armed=True, begun=True, armed_s=START_S, edge_s=START_S, region=Region.BACKWARD, steps=5
)


def run(watch: Watch, seconds: float, look_at: Callable[[float], Look], *, from_s: float = START_S) -> list[Suspicion]:
    """Tick once a second; all suspicions that came."""
    found = [watch.tick(from_s + second, [look_at(from_s + second)]) for second in range(1, int(seconds) + 1)]
    return [one for one in found if one is not None]


def stands_still(look: Look) -> Callable[[float], Look]:
    return lambda _: look


def test_a_rank_that_steps_is_never_suspected() -> None:
    watch = Watch(LIMITS)

    assert run(watch, 300, lambda now_s: replace(TRAINS, edge_s=now_s - 0.1, steps=int(now_s))) == []


def test_a_rank_that_stands_still_in_training_is_suspected_at_the_floor() -> None:
    found = run(Watch(LIMITS), 30, stands_still(TRAINS))

    assert found[0].standings[0].quiet_s == LIMITS.floor_s
    assert found[0].beyond == (0,)
    assert "rank 0 has not moved for 10 s (backward" in found[0].sentence


def test_the_allowance_is_learnt_from_what_the_region_took() -> None:
    """A backward of 8 s is normal here, so that five times as much is not yet too long; a loader's 8 s would be."""
    watch = Watch(LIMITS)
    run(watch, 8, stands_still(TRAINS))
    moved = replace(TRAINS, edge_s=START_S + 8.5, steps=6)

    found = run(watch, 60, stands_still(moved), from_s=START_S + 9)
    beyond = [one.standings[0].quiet_s for one in found if one.beyond]

    assert 5 * 7 <= beyond[0] <= 5 * 9

    elsewhere = Watch(LIMITS)
    run(elsewhere, 8, stands_still(TRAINS))
    found = run(elsewhere, 60, stands_still(replace(moved, region=Region.LOADER)), from_s=START_S + 9)
    assert next(one.standings[0].quiet_s for one in found if one.beyond) < 12


def test_the_cap_bounds_what_is_learnt() -> None:
    watch = Watch(Limits(cap_s=20))
    run(watch, 9, stands_still(TRAINS))

    found = run(watch, 60, stands_still(replace(TRAINS, edge_s=START_S + 9.5)), from_s=START_S + 10)

    assert next(one for one in found if one.beyond).standings[0].allowed_s == 20


@pytest.mark.parametrize(
    ("look", "allowed_s"),
    [
        (replace(TRAINS, begun=False), LIMITS.first_step_s),
        (replace(TRAINS, begun=False, region=Region.NONE, edge_s=0.0), LIMITS.first_step_s),
        (replace(TRAINS, region=Region.OTHER), LIMITS.pause_s),
        (replace(TRAINS, saving=True), LIMITS.cap_s),
    ],
)
def test_a_pause_that_is_to_be_expected_has_the_long_allowance(look: Look, allowed_s: float) -> None:
    """It is looked at, because a deadlock can be anywhere, but nobody is told of it."""
    found = run(Watch(LIMITS), 110, stands_still(look))

    assert [one.beyond for one in found] == [()] * len(found)
    assert found[0].standings[0].allowed_s == allowed_s


def test_the_long_allowance_ends_too() -> None:
    found = run(Watch(Limits(cap_s=100, first_step_s=200)), 300, stands_still(replace(TRAINS, region=Region.OTHER)))

    assert next(one.standings[0].quiet_s for one in found if one.beyond) == 100


def test_a_program_without_a_probe_is_never_judged_by_time() -> None:
    assert run(Watch(LIMITS), 5000, stands_still(Look(rank=0, pid=7, state="S"))) == []


@pytest.mark.parametrize("armed", [True, False])
def test_a_stopped_rank_is_suspected_within_seconds(armed: bool) -> None:
    found = run(Watch(LIMITS), 10, stands_still(replace(TRAINS, armed=armed, state="T")))

    assert 3 <= found[0].standings[0].stopped_s <= 4
    assert "stopped by a signal" in found[0].sentence


def test_a_rank_that_is_stopped_for_a_moment_is_not() -> None:
    def now_and_then(now_s: float) -> Look:
        return replace(TRAINS, edge_s=now_s, state="T" if int(now_s) % 3 else "S")

    assert run(Watch(LIMITS), 60, now_and_then) == []


def test_a_stop_teaches_nothing() -> None:
    """A minute in state T does not make a minute in the backward normal."""
    watch = Watch(LIMITS)
    run(watch, 60, stands_still(replace(TRAINS, state="T")))

    found = run(watch, 20, stands_still(replace(TRAINS, edge_s=START_S + 61)), from_s=START_S + 61)

    assert found[0].standings[0].allowed_s == LIMITS.floor_s


def test_the_first_step_teaches_nothing() -> None:
    """It compiles; the next ones do not."""
    watch = Watch(LIMITS)
    run(watch, 60, stands_still(replace(TRAINS, begun=False)))

    found = run(watch, 20, stands_still(replace(TRAINS, edge_s=START_S + 61)), from_s=START_S + 61)

    assert found[0].standings[0].allowed_s == LIMITS.floor_s


def test_moving_again_clears_the_suspicion() -> None:
    watch = Watch(LIMITS)
    assert run(watch, 20, stands_still(TRAINS))

    assert watch.tick(START_S + 21, [replace(TRAINS, edge_s=START_S + 20.9)]) is None


def test_the_end_of_a_save_is_progress_without_an_edge() -> None:
    watch = Watch(LIMITS)
    run(watch, 20, stands_still(replace(TRAINS, region=Region.FORWARD, saving=True)))

    assert watch.tick(START_S + 21, [replace(TRAINS, region=Region.FORWARD)]) is None


def test_after_a_pause_of_the_launcher_itself_every_rank_starts_anew() -> None:
    """The machine was suspended, or the agent stopped: the ranks may have been too."""
    watch = Watch(LIMITS)
    watch.tick(START_S + 1, [TRAINS])

    assert watch.tick(START_S + 500, [TRAINS]) is None
    assert run(watch, 9, stands_still(TRAINS), from_s=START_S + 500) == []
    assert run(watch, 9, stands_still(TRAINS), from_s=START_S + 509) != []


def test_a_new_process_of_a_rank_is_a_new_rank() -> None:
    watch = Watch(LIMITS)
    run(watch, 20, stands_still(TRAINS))

    assert watch.tick(START_S + 21, [replace(TRAINS, pid=8, edge_s=0.0, armed=False)]) is None


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(TRAINING)), st.floats(0.05, 9.0)),
        min_size=1,
        max_size=60,
    )
)
def test_progress_within_the_floor_is_never_suspected(intervals: list[tuple[Region, float]]) -> None:
    watch, edge_s, now_s, steps = Watch(LIMITS), START_S, START_S, 0
    for region, interval_s in intervals:
        look = replace(TRAINS, region=region, edge_s=edge_s, steps=steps)
        while now_s < edge_s + interval_s:
            assert watch.tick(now_s, [look]) is None
            now_s += 1.0
        edge_s += interval_s
        steps += 1
