"""When a trace begins, how long it is, whom it is of and what it cost: pure."""

from __future__ import annotations

import pytest

from gpulaunch.profiler.channel.ring import StepEvent
from gpulaunch.profiler.daemon.window import Speed, is_back, length_s, slowest, speed_of, window

MS = 1_000_000


def steps(*durations_ms: float, **phases_ms: float) -> list[StepEvent]:
    """Steps that follow each other from 0 on; the phases are the same in each."""
    events: list[StepEvent] = []
    at_ns = 0
    for number, duration_ms in enumerate(durations_ms):
        duration_ns = round(duration_ms * MS)
        phase_ns = {phase: round(phase_ms * MS) for phase, phase_ms in phases_ms.items()}
        events.append(StepEvent(step=number, start_ns=at_ns, duration_ns=duration_ns, phase_ns=phase_ns, samples=0))
        at_ns += duration_ns
    return events


def test_a_rank_has_time_to_hear_to_ask_and_to_make_ready() -> None:
    """It hears at the end of a step within a second, asks once in 5 s, and Kineto needs two turns of a second."""
    of_all = window(1000, step_s=3.0, duration_s=0.5, has_gpu=False)

    assert of_all.orders_ns - 1000 >= (3.0 + 1.0 + 5.0) * 1e9
    assert of_all.start_ns - of_all.orders_ns >= 2.0 * 1e9
    assert of_all.end_ns - of_all.start_ns == 500 * MS
    assert of_all.warmup_s == 0


def test_a_gpu_warms_up_before_the_window() -> None:
    plain, gpu = (window(0, step_s=0.1, duration_s=1.0, has_gpu=has_gpu) for has_gpu in (False, True))

    assert gpu.warmup_s == 1
    assert gpu.start_ns - plain.start_ns == gpu.warmup_s * 1_000_000_000
    assert gpu.orders_ns == plain.orders_ns


def a_speed(step_s: float, noise_s: float = 0.0) -> Speed:
    return Speed(step_s=step_s, noise_s=noise_s, num_steps=64)


@pytest.mark.parametrize(
    ("speed", "step_ms"),
    [
        (a_speed(0.1), 100.0),
        (a_speed(0.1), 149.0),  # being recorded makes them half as long again
        (a_speed(0.1, noise_s=0.05), 200.0),  # they are all slow ones
        (a_speed(0.1, noise_s=0.05), 299.0),
    ],
)
def test_a_window_holds_the_steps_wherever_it_begins(speed: Speed, step_ms: float) -> None:
    for into_a_step_ms in range(0, 100, 7):
        of_all = window(0, step_s=0.1, duration_s=length_s(5, speed), has_gpu=False)
        assert len(of_all.inside(steps(into_a_step_ms + 1, *[step_ms] * 200))) >= 5


def test_steps_that_are_cut_are_touched_and_not_in_it() -> None:
    of_all = window(0, step_s=0.0, duration_s=0.25, has_gpu=False)
    shift_ms = of_all.start_ns / MS
    events = steps(shift_ms - 50, 100, 100, 100, 100, 100)  # the second begins 50 ms before the window

    assert [event.step for event in of_all.touched(events)] == [1, 2, 3]
    assert [event.step for event in of_all.inside(events)] == [2, 3]


def test_the_shortest_window_is_one_that_kineto_can_keep() -> None:
    assert length_s(1, a_speed(0.0001)) == pytest.approx(0.05)


def test_speed_is_the_median_and_its_noise_does_not_mind_a_few_slow_steps() -> None:
    speed = speed_of(steps(10, 11, 9, 10, 500, 10, 11, 9, 10))

    assert speed is not None
    assert speed.step_s == pytest.approx(0.010)
    assert speed.noise_s == pytest.approx(0.0015, rel=0.1)
    assert speed.num_steps == 9
    assert speed_of([]) is None


@pytest.mark.parametrize(
    ("before_ms", "after_ms", "back"),
    [
        ([10, 11, 9, 10, 11, 9], [10, 10, 10, 10, 10], True),
        ([10, 11, 9, 10, 11, 9], [11.5, 11.5, 11.5, 11.5, 11.5], True),  # within twice the noise
        ([10, 11, 9, 10, 11, 9], [14, 14, 14, 14, 14], False),
        ([10, 10, 10, 10, 10], [10.1, 10.1, 10.1, 10.1, 10.1], True),  # 1 % is nothing, even where there was no noise
        ([10, 10, 10, 10, 10], [11, 11, 11, 11, 11], False),
        ([10, 10, 10, 10, 10], [5, 5, 5, 5, 5], True),
        ([10, 10, 10, 10], [20, 20, 20, 20, 20], None),  # too few to say anything
        ([10, 10, 10, 10, 10], [20], None),
    ],
)
def test_a_rank_is_back_when_it_is_within_twice_its_noise(
    before_ms: list[float], after_ms: list[float], back: bool | None
) -> None:
    before, after = speed_of(steps(*before_ms)), speed_of(steps(*after_ms))

    assert before is not None
    assert after is not None
    assert is_back(before, after) is back


def test_the_slowest_is_the_one_that_the_others_wait_for() -> None:
    """All steps are 100 ms: two ranks wait in the backward for the third, whose data come late."""
    waiting = steps(*[100.0] * 5, data_wait=5, forward=20, backward=75)
    late = steps(*[100.0] * 5, data_wait=60, forward=20, backward=20)

    assert slowest({0: waiting, 1: late, 2: waiting}) == 1


def test_ranks_that_are_alike_and_ranks_without_steps() -> None:
    alike = steps(*[100.0] * 5, forward=100)

    assert slowest({3: alike, 1: alike}) == 1
    assert slowest({0: [], 1: alike}) == 1
    assert slowest({0: []}) == 0
