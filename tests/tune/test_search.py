"""Which trial comes next, and what is recommended, with step times that are given."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from gpulaunch.launcher.tune.change import Change, together
from gpulaunch.launcher.tune.search import FollowUp, Measured, Search

SITE = "train.py:7 main"


def workers(number: int) -> Change:
    return Change(loaders={SITE: {"num_workers": number, "persistent_workers": True}})


THREADS = Change(torch={"num_threads": 2})
VIEW = Change(ddp={"gradient_as_bucket_view": True})


class Machine:
    """Gives each change its step time, and counts the trials."""

    def __init__(self, times_s: Mapping[str, float], base_s: float = 0.1, noise: float = 0.005, seed: int = 0) -> None:
        self.times_s = times_s
        self.base_s = base_s
        self.noise = noise
        self.random = random.Random(seed)
        self.order: list[str] = []

    def trial(self, change: Change) -> Measured:
        self.order.append(change.name)
        time_s = self.times_s.get(change.name, self.base_s)
        return Measured(step_s=time_s * (1 + self.random.uniform(-self.noise, self.noise)), waits=0.5)


def searched(
    changes: list[Change], machine: Machine, trials: int = 40, follow_up: FollowUp = lambda _change, _measured: ()
) -> Search:
    search = Search(changes, follow_up)
    for left in range(trials, 0, -1):
        if (change := search.next(left)) is None:
            break
        search.add(change, machine.trial(change))
    return search


def names(search: Search) -> list[str]:
    return [each.change.name for each in search.recommended()]


def test_what_gains_is_recommended_and_what_does_not_is_tried_once() -> None:
    machine = Machine({workers(4).name: 0.05})
    search = searched([workers(4), THREADS, VIEW], machine)

    assert names(search) == [workers(4).name]
    assert search.best() is search.recommended()[0]
    assert machine.order.count(THREADS.name) <= 2
    assert machine.order[:2] == ["", workers(4).name]
    assert machine.order.count("") >= 2, "the job as it is, more than once"


def test_nothing_is_recommended_where_nothing_gains() -> None:
    for seed in range(200):
        machine = Machine({}, noise=0.02, seed=seed)
        search = searched([workers(2), workers(4), THREADS, VIEW], machine)
        assert search.best() is None, seed


def test_gains_are_tried_together() -> None:
    both = together([workers(4), THREADS])
    machine = Machine({workers(4).name: 0.06, THREADS.name: 0.08, both.name: 0.05})
    search = searched([workers(4), THREADS], machine)
    best = search.best()

    assert best is not None
    assert best.change.as_json() == both.as_json()
    assert both.name in machine.order


def test_gains_that_do_not_hold_together_are_not_applied_together() -> None:
    both = together([workers(4), THREADS])
    machine = Machine({workers(4).name: 0.06, THREADS.name: 0.08, both.name: 0.09})
    best = searched([workers(4), THREADS], machine).best()

    assert best is not None
    assert best.change == workers(4)


def test_of_numbers_of_workers_the_smallest_of_the_best_is_taken() -> None:
    machine = Machine({workers(2).name: 0.07, workers(4).name: 0.0505, workers(8).name: 0.05})
    search = searched([workers(2), workers(4), workers(8)], machine)

    assert names(search) == [workers(4).name]


def test_a_gain_leads_to_more_of_it() -> None:
    machine = Machine({workers(2).name: 0.07, workers(4).name: 0.05, workers(8).name: 0.05})

    def double(change: Change, _measured: Measured) -> list[Change]:
        number = change.loaders[SITE]["num_workers"]
        return [workers(2 * number)] if number < 8 else []

    search = searched([workers(2)], machine, follow_up=double)

    assert names(search) == [workers(4).name]
    assert workers(8).name in machine.order


@pytest.mark.parametrize("trials", range(1, 12))
def test_what_gained_is_made_sure_before_time_runs_out(trials: int) -> None:
    machine = Machine({workers(4).name: 0.05})
    search = searched([workers(4), workers(2), workers(8), THREADS, VIEW], machine, trials=trials)

    assert len(machine.order) <= trials
    if trials >= 4:
        assert names(search) == [workers(4).name]


def test_a_change_that_fails_is_no_gain_and_is_told() -> None:
    search = Search([workers(4), THREADS])
    search.add(Change(), Measured(step_s=0.1))
    search.add(workers(4), Measured(step_s=None, died="killed by the kernel"))

    assert search.tried[0].failed == "killed by the kernel"
    assert search.gain(search.tried[0]) is None
    assert search.next(10) == THREADS


def test_the_same_change_twice_is_tried_as_one() -> None:
    search = searched([workers(2), workers(2), THREADS], Machine({}))

    assert [each.change for each in search.tried] == [workers(2), THREADS]


def test_without_time_there_is_no_trial() -> None:
    assert Search([THREADS]).next(0) is None
    assert Search([]).next(1) == Change(), "the job as it is"


def test_changes_are_put_together() -> None:
    change = together([workers(2), Change(loaders={SITE: {"prefetch_factor": 4}}), THREADS, Change(gc_freeze=True)])

    assert change.as_json() == {
        "loaders": {SITE: {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}},
        "torch": {"num_threads": 2},
        "gc_freeze": True,
    }
    assert change.name == "num_workers=2, persistent_workers=True, prefetch_factor=4, num_threads=2, gc.freeze=True"
    assert change.where == "train.py:7, the program's start"


def test_a_change_that_alters_what_is_learnt_is_not_recommended() -> None:
    search = Search([workers(4), THREADS])
    same, other = [1.0 - 0.01 * each for each in range(10)], [1.5 - 0.01 * each for each in range(10)]
    for change, step_s, losses in (
        *((Change(), 0.100, same),) * 2,
        *((workers(4), 0.050, other),) * 2,
        *((THREADS, 0.080, same),) * 2,
    ):
        search.add(change, Measured(step_s=step_s, losses=losses))

    assert names(search) == [THREADS.name]
    assert search.refused(search.tried[0]) == "alters the loss: 0.955 -> 1.455"
    assert search.refused(search.tried[1]) == ""
