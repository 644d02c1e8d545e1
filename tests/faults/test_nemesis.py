"""Random faults, and that what must hold after them is really looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import nemesis
import pytest
from nemesis import History, Made, plan, violations

from gpulaunch.launcher.chaos.faults import Fault, Verb

EXPECTED = {0: [(f"loss {step}", [step]) for step in range(1, 21)]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> nemesis.Result:
    return nemesis.undisturbed(tmp_path_factory.mktemp("undisturbed"), 2)


@pytest.mark.torch
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_seed_of_the_nemesis(seed: int, tmp_path: Path, undisturbed: nemesis.Result) -> None:
    history = nemesis.run(seed, tmp_path / "job")

    assert violations(history, undisturbed) == [], nemesis.tell(history, tmp_path)


def test_a_seed_decides_what_is_done() -> None:
    assert plan(7, blows=20, ranks=4) == plan(7, blows=20, ranks=4)
    assert plan(7, blows=20, ranks=4) != plan(8, blows=20, ranks=4)
    assert plan(7, blows=20, ranks=4)[:5] == plan(7, blows=5, ranks=4)


def test_thirty_seeds_make_every_fault() -> None:
    made = {blow.fault.verb for seed in range(30) for blow in plan(seed, blows=5, ranks=2)}

    assert made == set(Verb)


# -- the checker: a history that is right, and one thing wrong in it at a time


def manifest(step: int, generation: int) -> dict:
    return {"step": step, "generation": generation, "attempt": generation - 1, "saved_s": 100.0 + step}


def right() -> History:
    """Twenty steps; rank 0 killed at step 12 of attempt 0, with checkpoints of steps 5 and 10."""
    steps = [(0, step) for step in range(1, 13)] + [(1, step) for step in range(11, 21)]
    return History(
        seed=0,
        code=0,
        made=[Made(fault=Fault(verb=Verb.KILL_RANK, rank=0), attempt=0, what="killed", committed=(5, 10))],
        attempts=2,
        first_steps={0: 1, 1: 11},
        steps=[
            {"rank": 0, "attempt": attempt, "step": step, "loss": f"loss {step}", "samples": [step]}
            for attempt, step in steps
        ],
        first_causes={0: ("signal", 0)},
        manifests=[manifest(5, 1), manifest(10, 1), manifest(15, 2), manifest(20, 2)],
        restarts=1,
    )


def test_a_right_history_has_no_violation() -> None:
    assert violations(right(), EXPECTED) == []


def without(**what: object) -> Callable[[History], History]:
    return lambda history: dataclasses.replace(history, **what)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ended with", without(code=1)),
        ("left behind", without(left=["process 7"])),
        ("generation goes back", without(manifests=[manifest(5, 2), {**manifest(10, 1), "attempt": 1}])),
        ("saved_s goes back", without(manifests=[manifest(5, 1), {**manifest(10, 1), "saved_s": 3.0}])),
        ("is of attempts", without(manifests=[manifest(5, 1), {**manifest(10, 1), "attempt": 1}])),
        ("never made", without(steps=right().steps[:-1])),
        ("other loss or samples", without(steps=[*right().steps, {**right().steps[3], "loss": "another"}])),
        ("other loss or samples", without(steps=[*right().steps, {**right().steps[3], "samples": [5]}])),
        ("resumed at 5", without(first_steps={0: 1, 1: 6})),
        ("nothing at all", without(made=[])),
        ("may end it", without(made=[dataclasses.replace(right().made[0], fault=Fault(verb=Verb.KILL_SIDECAR))])),
        ("is said to have ended by", without(first_causes={0: ("signal", 1)})),
        ("is said to have ended by", without(first_causes={0: ("peer", 0)})),
        ("has no first cause", without(first_causes={})),
        ("restarts were charged", without(restarts=2)),
    ],
)
def test_a_wrong_history_is_seen(name: str, change: Callable[[History], History]) -> None:
    assert [line for line in violations(change(right()), EXPECTED) if name in line], violations(
        change(right()), EXPECTED
    )
