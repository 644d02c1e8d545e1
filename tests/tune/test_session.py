"""Which steps trials measure, and what a trial's points say."""

from __future__ import annotations

from collections.abc import Sequence

from gpulaunch.launcher.tune.change import Change
from gpulaunch.launcher.tune.session import measured_of, steps_of
from gpulaunch.launcher.tune.trial import Point, Steps, Watched

S = 1_000_000_000
CHANGE = Change(torch={"num_threads": 2})


def watched(
    step_s: float, number: int, *, epoch_steps: int = 0, waits: float = 0.25, looks: int = 1, code: int | None = None
) -> Watched:
    """A trial whose steps all take the same; it is looked at after every `looks` of them."""
    points = [
        Point(
            steps=steps,
            at_ns=round((10 + steps * step_s) * S),
            step_ns=round(steps * step_s * S),
            phase_ns={"data_wait": round(waits * steps * step_s * S)},
            epochs=steps // epoch_steps if epoch_steps else 0,
        )
        for steps in range(1, number + 1, looks)
    ]
    return Watched(points=points, code=code)


def points(seen: Watched, steps: Steps | None) -> Sequence[int]:
    assert steps is not None
    ends = seen.between(steps)
    assert ends is not None
    return [each.steps for each in ends]


def test_trials_measure_some_seconds_once_prepared_batches_are_used_up() -> None:
    """16 workers prepare 32 batches before the first step."""
    seen = watched(0.050, 200)
    assert steps_of(seen) == Steps(first=37, count=60)
    assert points(seen, steps_of(seen)) == [37, 97]


def test_a_job_of_fewer_steps_is_measured_as_late_as_there_are_enough_of_them() -> None:
    """Then fewer workers are tried: see `Seen.most_prepared`."""
    assert steps_of(watched(0.150, 50)) == Steps(first=30, count=20)
    assert steps_of(watched(0.050, 90)) == Steps(first=30, count=60)


def test_slow_steps_are_measured_in_number() -> None:
    assert steps_of(watched(0.4, 40)) == Steps(first=20, count=20)


def test_fast_steps_are_seen_at_some_looks_only() -> None:
    seen = watched(0.002, 5000, looks=10)
    steps = steps_of(seen)
    assert steps is not None
    assert 1400 < steps.count < 1700
    assert points(seen, steps) == [steps.first, steps.first + steps.count]


def test_epochs_that_begin_are_part_of_it() -> None:
    assert steps_of(watched(0.050, 200, epoch_steps=80)) == Steps(first=37, count=123)


def test_a_job_of_few_steps_is_no_measure() -> None:
    assert steps_of(watched(0.1, 25)) is None
    assert steps_of(Watched()) is None


def test_a_trial_gives_its_step_time_and_what_it_waited() -> None:
    measured = measured_of(watched(0.040, 200, waits=0.5), Steps(first=20, count=60), Change())
    assert measured.step_s is not None
    assert abs(measured.step_s - 0.040) < 1e-6
    assert abs(measured.waits - 0.5) < 1e-6


def test_a_trial_that_ended_before_its_steps_is_no_measure() -> None:
    died = watched(0.04, 30, code=1)
    died.error = "rank 0: RuntimeError: DataLoader worker killed"
    steps = Steps(first=20, count=60)

    assert measured_of(died, steps, CHANGE).died == "rank 0: RuntimeError: DataLoader worker killed"
    assert measured_of(watched(0.4, 30), steps, CHANGE).died == "slower"
    assert measured_of(Watched(late=True), steps, CHANGE).died == "hung, or much slower"
    assert measured_of(watched(0.04, 30, code=0), steps, CHANGE).died == "ended before it was measured"
    assert measured_of(Watched(full="set TMPDIR"), steps, CHANGE).died == "set TMPDIR"


def test_a_change_that_was_not_applied_is_no_result() -> None:
    seen = watched(0.04, 200)
    steps = Steps(first=20, count=60)
    seen.facts = {"loaders": [{}], "changes": {"applied": {}, "refused": {"train.py:7 num_workers": "iterable"}}}
    assert measured_of(seen, steps, CHANGE).refused == "train.py:7 num_workers: iterable"
    seen.facts = {"loaders": [{}], "changes": {"applied": {}, "refused": {}}}
    assert measured_of(seen, steps, CHANGE).refused == "not used by the program: torch num_threads"
    seen.facts = {"loaders": [{}], "changes": {"applied": {"torch num_threads": [1, 2]}, "refused": {}}}
    assert measured_of(seen, steps, CHANGE).step_s is not None
    seen.facts["torch_threads"] = 1
    assert measured_of(seen, steps, CHANGE).refused == "the program itself sets the number of threads"
