"""How many workers are advised, and where more would not help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from healthy_node import HEALTHY_MS, OWN_MS, STEPS, facts, fetching, loader, rank, rules, starved, window
from rule_cases import CASES

from gpulaunch.profiler.analysis.advisor import advise
from gpulaunch.profiler.analysis.finding import ESTIMATED
from gpulaunch.profiler.analysis.thresholds import TENSOR_S, TRANSFER_S
from gpulaunch.profiler.analysis.window import Window


def test_a_busy_worker_beside_free_cores_wants_company() -> None:
    (found,) = advise(starved())

    assert found.rule == "dataloader-too-few-workers"
    assert found.evidence["workers_advised"] == 2
    assert "num_workers=2" in found.advice


def test_more_workers_are_not_advised_while_they_wait_for_cores() -> None:
    """A third of a fetch in the run queue: one more worker would only make that longer."""
    assert rules(starved(fetch={"cpu": 0.6, "runqueue": 0.4}, cores=2.0)) == ["dataloader-slow-transform"]


def test_more_workers_are_not_advised_where_the_cores_are_full_already() -> None:
    """158 ms of a worker and 90 ms of the trainer at every step of 158 ms: that is what 1.5 cores can do."""
    assert rules(starved(cores=1.5)) == ["dataloader-slow-transform"]


def test_the_start_of_workers_is_not_taken_for_sending() -> None:
    """They import torch at each epoch: as CPU time of theirs outside of fetches this looks like pickling."""
    waiting = {"phases_ms": {"data_wait": 60.0}, "workers": fetching(5.0), "workers_cpu_s": 14.0}
    epochs = loader(workers=1, wait_ms=60.0, epochs=2, first_wait_ms=3000.0)
    anew = rank(**waiting, loader=epochs, facts=facts(loader={"persistent_workers": False}))

    assert rules(window(rank(**waiting, loader=loader(workers=1, wait_ms=60.0)))) == ["dataloader-too-many-workers"]
    assert rules(window(anew)) == ["dataloader-workers-restarted"]


def test_more_workers_are_not_advised_than_the_cores_that_they_may_run_on() -> None:
    (free,) = starved().ranks
    bound = replace(free, worker_cores=frozenset({5}))

    assert rules(window(bound)) == ["dataloader-pinned-workers"]
    assert rules(window(replace(free, worker_cores=frozenset(range(16))))) == ["dataloader-too-few-workers"]


def test_where_there_are_cores_for_too_few_workers_the_transform_is_the_cause() -> None:
    """248 ms on a core at every step: on two of them a step takes 115 ms, and training still waits for 17 ms of it."""
    (found,) = advise(starved(cores=2.0))

    assert found.rule == "dataloader-slow-transform"
    assert found.advice.endswith("There are cores for 2 workers, which alone would save 43 ms.")
    assert found.seconds_per_step == pytest.approx(0.060)


def test_a_cheaper_transform_also_frees_the_core_that_the_training_thread_waits_for() -> None:
    """At most the part of its own time in which it does not compute itself."""
    (busy,) = starved(cores=1.5).ranks
    full = replace(busy, gpu=None)
    waits = replace(full, trainer_runqueue_s=0.005 * full.steps)
    own = 1.0 - full.phase_s("data_wait") / full.step_s
    told = [
        advise(window(each, cores=1.5))[0]
        for each in (replace(full, trainer_runqueue_s=None), waits, replace(waits, trainer_cpu_s=full.step_s * 9e9))
    ]

    assert [each.rule for each in told] == ["dataloader-slow-transform"] * 3
    assert told[1].seconds_per_step - told[0].seconds_per_step == pytest.approx(0.005 * own)
    assert told[2].seconds_per_step == pytest.approx(told[0].seconds_per_step)


def test_more_computing_workers_are_not_advised_on_a_crowded_node() -> None:
    assert rules(starved(pressure_s={("cpu", "some"): 8.0}, cores=1.9)) == ["dataloader-slow-transform"]


def test_a_node_that_others_crowd_is_not_the_programs_fault() -> None:
    """Sixteen cores, of which it uses one and a half; others have the rest: a cheaper transform would not help."""
    assert rules(starved(pressure_s={("cpu", "some"): 8.0})) == []
    assert rules(replace(CASES["dataloader-too-many-workers"].fault, pressure_s={("cpu", "some"): 8.0})) == []


def test_more_workers_that_sleep_are_advised_on_a_crowded_node_too() -> None:
    """They wait for a network, and need no core for that."""
    assert rules(starved(fetch={"cpu": 0.02}, pressure_s={("cpu", "some"): 8.0})) == ["dataloader-too-few-workers"]


def test_where_the_kernel_counts_no_run_queue_half_computing_counts_as_computing() -> None:
    fetch = {"cpu": 0.3, "knows_runqueue": False}

    crowded = {"pressure_s": {("cpu", "some"): 8.0}}
    assert rules(starved(fetch=fetch, **crowded)) == []
    assert rules(starved(fetch=fetch, **crowded, cores=1.9)) == ["dataloader-slow-transform"]
    assert rules(starved(fetch=fetch)) == ["dataloader-too-few-workers"]


def test_workers_that_idle_are_not_what_training_waits_for() -> None:
    assert rules(starved(fetch={"fetch_ms": 60.0}, workers_cpu_s=6.0)) == []


def test_workers_that_are_busy_sending_are_too_many() -> None:
    """A thread of theirs pickles 300 tensors a batch, outside of the fetches: 135 ms of each step."""
    (found,) = advise(starved(fetch={"fetch_ms": 5.0, "cpu": 0.9}))

    assert found.rule == "dataloader-too-many-workers"
    assert found.evidence["workers_advised"] == 0
    assert found.evidence["handover_seconds_per_step"] == pytest.approx(0.1355)
    assert found.seconds_per_step == pytest.approx(0.055)


def without_a_queue(**its_facts: Any) -> Window:
    """Training waits 40 ms for its loader, of which the page knows no workers; the program has told these facts."""
    waiting = rank(
        phases_ms={"data_wait": 40.0},
        loader=loader(workers=0, wait_ms=40.0),
        workers=fetching(batches=0),
        workers_cpu_s=0.0,
        facts=facts(loader=its_facts),
    )
    return window(waiting)


def test_a_training_thread_that_fetches_for_itself_wants_workers() -> None:
    alone = without_a_queue(num_workers=0)

    (found,) = advise(alone)

    assert found.rule == "dataloader-too-few-workers"
    assert found.seconds_per_step == pytest.approx(0.040 - TRANSFER_S.value)
    assert "now 0" in found.advice


@pytest.mark.parametrize(("tensors", "saved_s"), [(120, 0.040 - TRANSFER_S.value - 119 * TENSOR_S.value), (600, None)])
def test_a_worker_sends_each_tensor_of_a_batch(tensors: int, saved_s: float | None) -> None:
    """A list of 40 pictures, with the boxes and labels of each: a worker made the steps longer."""
    alone = without_a_queue(num_workers=0, tensors=tensors)

    saved = [found.seconds_per_step for found in advise(alone) if found.rule == "dataloader-too-few-workers"]

    assert saved == ([] if saved_s is None else [pytest.approx(saved_s)])


def test_workers_whose_queue_cannot_be_read_are_not_advised() -> None:
    """In a torch that keeps it elsewhere the page says nothing of workers; the program has told of them."""
    unread = without_a_queue(num_workers=4)

    assert rules(unread) == []


def test_batches_that_are_made_in_a_moment_need_no_worker() -> None:
    """One millisecond of six: a worker would cost as much."""
    ms = {phase: 0.05 * each for phase, each in HEALTHY_MS.items()}
    quick = rank(phases_ms={**ms, "data_wait": 1.0}, loader=loader(workers=0, wait_ms=1.0), workers=fetching(batches=0))

    assert rules(window(quick)) == []


def alone(
    own_ms: float, wait_ms: float, *, cpu_ms: float, changes: dict[str, Any] | None = None, **more: Any
) -> Window:
    """No workers: the training thread fetches, and its process has this CPU time in a step."""
    fetches = {
        "phases_ms": {**dict.fromkeys(HEALTHY_MS, 0.0), "forward": own_ms, "data_wait": wait_ms},
        "loader": loader(workers=0, wait_ms=wait_ms),
        "workers": fetching(batches=0),
        "trainer_cpu_s": cpu_ms * STEPS / 1e3,
        "workers_cpu_s": 0.0,
        "facts": facts(loader={"num_workers": 0}, torch_threads=1),
    }
    return window(rank(**{**fetches, **(changes or {})}), **more)


@pytest.mark.parametrize("crowded_s", [0.5, 9.0], ids=["quiet", "under pressure"])
def test_a_training_thread_that_fetches_for_itself_on_the_only_core_wants_cheaper_fetches(crowded_s: float) -> None:
    """There is no core for a worker, and nine tenths of the time go into `__getitem__`."""
    (found,) = advise(alone(10.0, 90.0, cpu_ms=98.0, cores=1.0, pressure_s={("cpu", "some"): crowded_s}))

    assert (found.rule, found.file, found.line) == ("dataloader-slow-transform", "train.py", 41)
    assert (found.seconds_per_step, found.confidence) == (pytest.approx(0.090), ESTIMATED)
    assert "num_workers=0" in found.advice
    assert "no core is free for a worker" in found.advice
    assert found.evidence["computing_ratio"] == pytest.approx((98 + 0.5 - 10) / 90)  # on the core, and in its queue


SAMPLED = {"fetches": 40, "fetching": {"data.py:9": 36, "train.py:20": 3}, "calls": {"data.py:9": "json.load"}}


def test_the_line_that_holds_a_fetch_of_the_training_thread_is_told() -> None:
    """Workers would hide it, but it may not be needed; without a core for them it has to become cheaper."""
    (hidden,) = advise(alone(10.0, 90.0, cpu_ms=98.0, changes=SAMPLED, cores=4.0))
    (found,) = advise(alone(10.0, 90.0, cpu_ms=98.0, changes=SAMPLED, cores=1.0))

    assert (hidden.rule, hidden.file, hidden.line) == ("dataloader-too-few-workers", "train.py", 41)
    assert hidden.advice.endswith(
        "90% of a fetch is json.load at data.py:9: is it needed for each sample? Without it a step would take 81 ms "
        "less, with workers 75.5 ms."
    )
    assert (found.rule, found.file, found.line) == ("dataloader-slow-transform", "data.py", 9)


def test_where_workers_take_cores_from_training_the_line_is_what_is_lost() -> None:
    """Training computes for 30 ms on both cores, so a worker's 20 ms only move; without the line they are gone."""
    line = {**SAMPLED, "facts": facts(loader={"num_workers": 0}, torch_threads=2)}
    (found,) = advise(alone(30.0, 20.0, cpu_ms=78.0, changes=line, cores=2.0))
    (unknown,) = advise(alone(30.0, 20.0, cpu_ms=78.0, changes={"facts": line["facts"]}, cores=2.0))

    assert found.rule == unknown.rule == "dataloader-too-few-workers"
    assert found.seconds_per_step == pytest.approx(0.9 * 0.020)
    assert unknown.seconds_per_step < found.seconds_per_step
    assert f"with workers {1e3 * unknown.seconds_per_step:.3g} ms." in found.advice


def test_two_ranks_that_fetch_for_themselves_fill_two_cores() -> None:
    (one,) = alone(10.0, 90.0, cpu_ms=98.0).ranks

    (found,) = advise(window(one, replace(one, rank=1), cores=2.0))

    assert (found.rule, found.ranks) == ("dataloader-slow-transform", (0, 1))


def test_a_fetch_that_waits_for_its_core_half_of_the_time_computes_all_the_same() -> None:
    """Four ranks on two cores."""
    (one,) = alone(10.0, 90.0, cpu_ms=50.0, changes={"trainer_runqueue_s": 0.048 * STEPS}).ranks
    four = [replace(one, rank=number) for number in range(4)]

    assert rules(window(*four, cores=2.0)) == ["dataloader-slow-transform"]
    uncounted = [replace(each, trainer_runqueue_s=None) for each in four]
    assert rules(window(*uncounted, cores=2.0)) == []


@pytest.mark.parametrize(("main_ms", "told"), [(75.0, ["dataloader-slow-transform"]), (60.0, []), (None, [])])
def test_of_a_process_whose_other_threads_may_have_used_the_cores_the_first_thread_tells_what_it_computes(
    main_ms: float | None, told: list[str]
) -> None:
    """Its step without the fetch takes 30 ms, in which eight threads may compute."""
    main_s = None if main_ms is None else main_ms * STEPS / 1e3
    threads = {"facts": facts(loader={"num_workers": 0}, torch_threads=8), "main_thread_s": main_s}

    assert rules(alone(30.0, 70.0, cpu_ms=240.0, changes=threads, cores=2.0)) == told


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        # a core is free, and a worker would have it
        (alone(10.0, 90.0, cpu_ms=98.0, cores=2.0), ["dataloader-too-few-workers"]),
        # it stands still for storage, and a worker needs no core for that
        (alone(10.0, 90.0, cpu_ms=12.0, cores=1.0), ["dataloader-too-few-workers"]),
        # eight threads of training have used the CPU: the fetches may stand still for storage
        (
            alone(
                30.0,
                70.0,
                cpu_ms=240.0,
                changes={"facts": facts(loader={"num_workers": 0}, torch_threads=8)},
                cores=3.0,
                pressure_s={("cpu", "some"): 9.0},
            ),
            [],
        ),
        # hardly anything is waited for
        (alone(95.0, 5.0, cpu_ms=98.0, cores=1.0), []),
        # a batch is made in a moment
        (alone(0.5, 1.5, cpu_ms=1.9, cores=1.0), []),
        # others have a good part of the core
        (alone(10.0, 90.0, cpu_ms=60.0, cores=1.0, pressure_s={("cpu", "some"): 9.0}), []),
        # there are workers, and their queue cannot be read
        (alone(10.0, 90.0, cpu_ms=98.0, changes={"facts": facts(torch_threads=1)}, cores=1.0), []),
    ],
)
def test_fetches_of_the_training_thread_are_to_be_cheaper_only_if_they_compute_and_no_worker_could(
    seen: Window, told: list[str]
) -> None:
    assert rules(seen) == told


@pytest.mark.parametrize(
    ("own_ms", "wait_ms", "cpu_ms", "cores", "advised"),
    [
        (10.0, 90.0, 100.0, 2.0, 2),  # without the fetches, its thread needs a tenth of a core
        (50.0, 50.0, 100.0, 2.0, 1),  # it keeps one core busy, then as now
        (10.0, 90.0, 10.0, 2.0, 4),  # they sleep, and need no cores
        (10.0, 90.0, 100.0, 16.0, 11),  # there is one for each
    ],
)
def test_no_more_computing_workers_are_advised_than_find_a_core(
    own_ms: float, wait_ms: float, cpu_ms: float, cores: float, advised: int
) -> None:
    (found,) = advise(alone(own_ms, wait_ms, cpu_ms=cpu_ms, cores=cores))

    assert (found.rule, found.evidence["workers_advised"]) == ("dataloader-too-few-workers", advised)
    assert f"num_workers={advised} " in found.advice


def test_accumulated_gradients_take_several_batches_per_step() -> None:
    """Four batches a step, made one after another by one worker."""
    fetched = fetching((OWN_MS + 60.0) / 4, batches=4 * STEPS)
    one = rank(
        phases_ms={"data_wait": 60.0}, loader=loader(workers=1, wait_ms=60.0, batches=4 * STEPS), workers=fetched
    )

    (found,) = advise(window(one))

    assert (found.rule, found.evidence["workers_advised"]) == ("dataloader-too-few-workers", 2)
    assert found.seconds_per_step == pytest.approx(0.060)
