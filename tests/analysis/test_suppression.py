"""Advice that the evidence contradicts is not given, and the one that it supports instead is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from healthy_node import (
    HEALTHY_MS,
    MIB,
    MS,
    NO_PAUSES,
    OWN_MS,
    STEPS,
    facts,
    fetching,
    gpu,
    gpu_memory,
    host,
    loader,
    memory,
    rank,
    site,
    window,
)
from rule_cases import CASES, looping_rank, sharded_rank, two_ranks

from gpulaunch.profiler.analysis.advisor import advise
from gpulaunch.profiler.analysis.finding import DERIVED, ESTIMATED
from gpulaunch.profiler.analysis.thresholds import TRANSFER_S
from gpulaunch.profiler.analysis.window import RankWindow, Window


def rules(seen: Window) -> list[str]:
    return [found.rule for found in advise(seen)]


def starved(**changes) -> Window:
    """One worker computes without a pause, and training waits for it."""
    fetch = {"fetch_ms": OWN_MS + 60.0, **changes.pop("fetch", {})}
    waiting = rank(
        phases_ms={"data_wait": 60.0},
        loader=loader(workers=1, wait_ms=60.0),
        workers=fetching(**fetch),
        workers_cpu_s=changes.pop("workers_cpu_s", 14.0),
    )
    return window(waiting, **changes)


# --- workers


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
    """Sixteen cores, of which it uses one and a half: whoever has the rest, a cheaper transform would not help."""
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
    (found,) = advise(starved(fetch={"fetch_ms": 5.0}))

    assert found.rule == "dataloader-too-many-workers"
    assert found.evidence["workers_advised"] == 0
    assert found.evidence["handover_seconds_per_step"] == pytest.approx(0.1355)
    assert found.seconds_per_step == pytest.approx(0.055)


def test_a_training_thread_that_fetches_for_itself_wants_workers() -> None:
    alone = rank(
        phases_ms={"data_wait": 40.0},
        loader=loader(workers=0, wait_ms=40.0),
        workers=fetching(batches=0),
        workers_cpu_s=0.0,
        facts=facts(loader={"num_workers": 0}),
    )

    (found,) = advise(window(alone))

    assert found.rule == "dataloader-too-few-workers"
    assert found.seconds_per_step == pytest.approx(0.040 - TRANSFER_S.value)
    assert "now 0" in found.advice


def test_workers_whose_queue_cannot_be_read_are_not_advised() -> None:
    """In a torch that keeps it elsewhere the page says nothing of workers; the program has told of them."""
    unread = rank(
        phases_ms={"data_wait": 40.0},
        loader=loader(workers=0, wait_ms=40.0),
        workers=fetching(batches=0),
        workers_cpu_s=0.0,
        facts=facts(loader={"num_workers": 4}),
    )

    assert rules(window(unread)) == []


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
    assert hidden.advice.endswith("90% of a fetch is json.load at data.py:9: is it needed for each sample?")
    assert (found.rule, found.file, found.line) == ("dataloader-slow-transform", "data.py", 9)


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


def test_batches_for_evaluation_are_not_counted_as_training() -> None:
    evaluating = replace(loader(wait_ms=2.0), eval_batches=STEPS)

    assert rules(window(rank(loader=evaluating))) == []


def test_reads_from_the_page_cache_are_not_slow_storage() -> None:
    case = CASES["dataloader-slow-storage"].fault
    cached = replace(case.ranks[0], workers=fetching(2 * (OWN_MS + 60.0), cpu=0.1, cached_bytes=900 * MIB))

    assert rules(replace(case, ranks=(cached,))) == ["dataloader-too-few-workers"]


def test_what_the_kernel_does_for_reads_from_storage_goes_with_them() -> None:
    """On a virtual disk it took half of the fetches' CPU time; both workers together kept one core busy."""
    case = CASES["dataloader-slow-storage"].fault
    reads = fetching(2 * (OWN_MS + 60.0), cpu=0.45, storage_bytes=900 * MIB)
    busy_s = case.ranks[0].steps * (OWN_MS + 60.0) / 1e3

    def predicted_ms(system_s: float) -> float:
        slow = replace(case.ranks[0], workers=reads, workers_cpu_s=busy_s, workers_system_s=system_s)
        (found,) = advise(replace(case, ranks=(slow,), cores=2.0))
        assert found.rule == "dataloader-slow-storage"
        return 1e3 * found.seconds_per_step

    assert predicted_ms(0.9 * busy_s) == pytest.approx(60.0, rel=0.01)
    assert predicted_ms(0.0) < 45.0


def test_workers_that_crowd_the_node_are_too_many() -> None:
    """Forty on sixteen cores, nine tenths of the time in the run queue. The cores are full: fewer save memory only."""
    crowd = rank(
        phases_ms={"data_wait": 60.0},
        loader=loader(workers=40, wait_ms=60.0),
        workers=fetching(40 * (OWN_MS + 60.0), cpu=0.1, runqueue=0.88),
        trainer_cpu_s=9.0,
        workers_cpu_s=16 * 15.8 - 9.0,
        facts=facts(loader={"num_workers": 40}),
    )

    found = {each.rule: each for each in advise(window(crowd, pressure_s={("cpu", "some"): 9.9}))}

    assert found["dataloader-too-many-workers"].seconds_per_step == pytest.approx(0.0, abs=1e-9)
    assert found["dataloader-too-many-workers"].evidence["workers_advised"] == 15
    assert "dataloader-too-few-workers" not in found


@pytest.mark.parametrize(("blocked_ms", "found"), [(35.0, ["dataloader-head-of-line"]), (25.0, [])])
def test_where_workers_are_idle_a_late_batch_is_the_cause_though_they_are_idle_longer(blocked_ms, found) -> None:
    """The few batches that they may be ahead are ready soon, and then they wait for the late one, too."""
    late = rank(
        phases_ms={"data_wait": 60.0},
        loader=loader(workers=4, wait_ms=60.0, blocked_ms=blocked_ms),
        workers=fetching(200.0, cpu=0.1),
    )

    assert rules(window(late)) == found


def test_order_that_is_given_up_already_is_not_advised_again() -> None:
    case = CASES["dataloader-head-of-line"].fault
    unordered = replace(case.ranks[0], facts=facts(loader={"in_order": False}))

    assert rules(replace(case, ranks=(unordered,))) == []


def test_the_line_is_that_of_the_loader_that_trains() -> None:
    """The program has a second one, for evaluation, without workers."""
    said = facts(loader={"num_workers": 1})
    said["loaders"].append({**said["loaders"][0], "site": "eval.py:7 evaluate", "split": "eval", "num_workers": 0})
    said["loaders"].reverse()
    waiting = replace(starved().ranks[0], facts=said)

    (found,) = advise(window(waiting))

    assert (found.file, found.line) == ("train.py", 41)


# --- copies and syncs


def test_a_wait_for_a_gpu_that_works_is_no_loss() -> None:
    busy = (gpu(utilization_ratio=1.0),)

    for rule in ("unpinned-copies", "blocking-copies", "sync-every-step"):
        assert rules(replace(CASES[rule].fault, gpus=busy)) == []


def test_without_the_gpus_account_a_wait_is_a_bound_and_says_so() -> None:
    case = CASES["sync-every-step"].fault

    (known,) = advise(case)
    (unknown,) = advise(replace(case, gpus=()))

    assert (known.confidence, unknown.confidence) == (DERIVED, ESTIMATED)
    assert unknown.seconds_per_step == pytest.approx(0.040)


def test_of_an_unpinned_copy_only_what_pinning_saves_is_promised() -> None:
    (found,) = advise(replace(CASES["unpinned-copies"].fault, gpus=()))

    assert found.seconds_per_step == pytest.approx(0.25 * 0.030)


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "is_told"),
    [(0, 0, True), (STEPS, 0, True), (0, STEPS, True), (STEPS // 4, STEPS // 4, True), (STEPS, STEPS, False)],
)
def test_a_copy_to_the_cpu_is_a_wait_unless_it_runs_beside_the_program(
    pinned: int, non_blocking: int, is_told: bool
) -> None:
    """`host.copy_(loss)` or `loss.to("cpu")`: as good as `loss.cpu()`, but into pinned memory and without blocking."""
    copied = site("d2h", blocked_ns=40 * STEPS * MS, pinned=pinned, non_blocking=non_blocking)
    seen = replace(CASES["sync-every-step"].fault, ranks=(rank(phases_ms={"sync": 40.0}, sites=(copied,)),))

    assert rules(seen) == ["sync-every-step"] * is_told


def test_a_sync_on_a_line_that_has_no_row_of_its_own_is_not_told() -> None:
    """There is no line to change in "elsewhere"."""
    case = CASES["sync-every-step"].fault
    elsewhere = replace(case.ranks[0], sites=(site("item", "", blocked_ns=40 * STEPS * MS),))

    assert rules(replace(case, ranks=(elsewhere,))) == []


def test_dataparallel_on_one_gpu_copies_nothing() -> None:
    assert rules(replace(CASES["dataparallel"].fault, gpus=(gpu(0),))) == []


def test_the_fullest_gpu_of_dataparallel_is_told() -> None:
    (found,) = advise(CASES["dataparallel"].fault)

    assert found.evidence["fullest_gpu_to_median_memory_ratio"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus": (gpu(ratios={"sm_active": 0.8, "tensor_active": 0.5, "fp32_active": 0.6}),)},
        {"gpus": (gpu(ratios={"sm_active": 0.3, "tensor_active": 0.0, "fp32_active": 0.6}),)},
        {"gpus": (gpu(ratios={}),)},
        {"gpus": ()},
    ],
)
def test_32_bits_are_no_finding_without_the_pipes_figures_or_against_them(changes) -> None:
    assert rules(replace(CASES["fp32-on-tensor-cores"].fault, **changes)) == []


def test_a_card_without_tensor_cores_cannot_use_them() -> None:
    old = {"type": "cuda", "uuid": "GPU-0", "capability": [6, 1]}
    case = CASES["fp32-on-tensor-cores"].fault
    precision = case.ranks[0].facts["precision"]

    assert rules(replace(case, ranks=(rank(facts=facts(device=old, precision=precision)),))) == []


# --- memory


def test_memory_that_grew_once_and_stays_is_no_growth() -> None:
    points = memory(points=16, trainer_mib=100)
    filled = tuple(replace(point, trainer_bytes=min(point.trainer_bytes, 2600 * MIB)) for point in points)

    assert rules(window(rank(memory=points))) == ["host-memory-growth"]
    assert rules(window(rank(memory=filled))) == []


def test_the_workers_growth_is_told_apart() -> None:
    (found,) = advise(window(rank(memory=memory(workers_mib=100))))

    assert found.subject == "workers"
    assert found.evidence["bytes_per_hour"] == pytest.approx(360 * 100 * MIB)
    assert "a worker copies every page" in found.advice


def test_what_workers_allocate_is_told_by_that_whatever_they_copy_meanwhile() -> None:
    """It is known at every window, what they copy only now and then."""
    both = memory(workers_mib=120, allocated_mib=100)
    seldom = tuple(replace(point, workers_bytes=500 * MIB) for point in both)
    found = [advise(window(rank(memory=points))) for points in (both, seldom)]

    assert [[(each.subject, each.evidence["bytes_per_hour"]) for each in one] for one in found] == [
        [("workers", pytest.approx(360 * 100 * MIB))]
    ] * 2
    assert all("an unbounded cache" in one.advice for (one,) in found)


def test_what_the_rank_keeps_is_not_told_of_workers_that_start_with_it() -> None:
    """Two of them, started anew at every epoch."""
    kept = memory(trainer_mib=100, allocated_mib=200)

    assert [each.subject for each in advise(window(rank(memory=kept)))] == ["trainer"]


def test_more_workers_are_no_growth() -> None:
    points = memory(points=16, workers_mib=100)
    more = tuple(replace(point, workers_alive=at) for at, point in enumerate(points))

    assert rules(window(rank(memory=more))) == []


def test_a_growth_that_takes_a_month_to_fill_the_memory_is_not_told() -> None:
    slow = tuple(replace(point, at_s=3600.0 * at) for at, point in enumerate(memory(trainer_mib=100)))

    assert rules(window(rank(memory=slow))) == []


def test_a_control_group_is_full_before_the_node() -> None:
    tight = host(cgroup_limit_bytes=4000 * MIB, cgroup_used_bytes=3000 * MIB)

    (found,) = advise(window(rank(memory=memory(trainer_mib=100)), host=tight))

    assert found.evidence["hours_to_full"] == pytest.approx(1000 / 10 / 3600)


@pytest.mark.parametrize(("used_mib", "room_mib"), [(76000, 4000 / 2 + 2000), (None, 80000 - 8000)])
def test_a_card_is_full_when_all_that_is_on_it_is(used_mib: int | None, room_mib: float) -> None:
    """Two ranks on one card, and somebody else who has the most of it: half of what is free, and what each has kept."""
    used_bytes = None if used_mib is None else used_mib * MIB
    grows = memory(gpu_mib=100)

    (found,) = advise(window(rank(0, memory=grows), rank(1, memory=grows), gpus=(gpu(memory_used_bytes=used_bytes),)))

    assert (found.rule, found.ranks) == ("gpu-memory-growth", (0, 1))
    assert found.evidence["hours_to_full"] == pytest.approx(room_mib / 10 / 3600)


def test_a_gpu_that_never_had_to_try_again_is_not_called_fragmented() -> None:
    split = gpu_memory(inactive_split_bytes=9000 * MIB)

    assert rules(window(rank(gpu=split))) == []


# --- pace


@pytest.mark.parametrize(
    ("phase", "cause"),
    [
        ("data_wait", "input"),
        ("h2d", "copies"),
        ("forward", "compute"),
        ("optimizer", "compute"),
        ("gc", "garbage collection"),
        ("other", "other"),
    ],
)
def test_a_late_rank_is_told_with_the_cause(phase: str, cause: str) -> None:
    found = [each for each in advise(two_ranks({phase: HEALTHY_MS[phase] + 30.0})) if each.rule == "straggler"]

    assert [(each.subject, each.ranks, each.evidence["cause"]) for each in found] == [("rank 1", (1,), cause)]


def test_a_late_rank_whose_gpu_is_throttled_has_that_cause() -> None:
    hot = (gpu(0), gpu(1, throttle_s={"thermal": 9.0}))

    found = {each.rule: each for each in advise(replace(CASES["straggler"].fault, gpus=hot))}

    assert found["straggler"].evidence["cause"] == "throttle"


def test_a_late_rank_that_waits_for_a_core_has_that_cause() -> None:
    one, late = CASES["straggler"].fault.ranks
    queued = replace(late, trainer_runqueue_s=0.025 * STEPS)

    (found,) = advise(window(one, queued))

    assert found.evidence["cause"] == "CPU contention"


def test_a_slow_rank_that_nobody_waits_for_is_no_straggler() -> None:
    """Ranks that do not talk to each other: the others have long ended their step."""
    assert rules(window(rank(0), rank(1, phases_ms={"forward": 60.0}))) == []


def test_among_eight_ranks_the_late_one_is_found() -> None:
    waiting = [rank(number, phases_ms={"backward": HEALTHY_MS["backward"] + 30.0}) for number in range(7)]

    (found,) = advise(window(*waiting, rank(7, phases_ms={"other": 34.0})))

    assert (found.rule, found.ranks) == ("straggler", (7,))


def test_two_saves_say_nothing_of_how_often_they_come() -> None:
    few = rank(phases_ms={"checkpoint": 20.0}, sites=(site("save", count=2, blocked_ns=20 * STEPS * MS),))

    assert rules(window(few)) == []
    assert rules(window(replace(few, saves=3))) == ["checkpoint-stall"]


def test_what_saves_outside_of_its_phase_is_a_part_of_the_stall() -> None:
    """Renaming files, removing older ones: a tenth of the samples. Without a save in the window it is not told."""
    saves = rank(
        phases_ms={"checkpoint": 20.0},
        sites=(site("save", count=5, blocked_ns=20 * STEPS * MS),),
        saving_share=0.1,
    )
    (found,) = advise(window(saves))

    assert found.seconds_per_step == pytest.approx(0.020 + 0.1 * saves.step_s)
    assert found.evidence["seconds_beside_saves_per_step"] == pytest.approx(0.1 * saves.step_s)
    assert rules(window(rank(saving_share=0.1))) == []
    assert rules(window(replace(saves, phase_ns={**saves.phase_ns, "checkpoint": 1000}))) == []


def test_what_comes_now_and_then_is_judged_over_the_long_window() -> None:
    """This window has the save, all of them together hardly any."""
    case = CASES["checkpoint-stall"]

    assert rules(replace(case.fault, longer=case.repaired)) == []
    assert rules(replace(case.repaired, longer=case.fault)) == ["checkpoint-stall"]


def test_a_line_is_told_where_most_collections_are_its() -> None:
    pauses = replace(NO_PAUSES, gc_collections=10, gc_ns_total=20 * STEPS * MS)
    for its_ms, line in ((19, 88), (9, None)):
        asks = site("gc", count=5, blocked_ns=its_ms * STEPS * MS), site("gc", "train.py:90 step", count=5)
        (found,) = advise(window(rank(phases_ms={"gc": 20.0}, pauses=pauses, sites=asks)))
        assert (found.rule, found.line) == ("gc-pauses", line)


def test_the_first_epoch_has_to_start_its_workers_and_persistent_ones_stay() -> None:
    first = {"phases_ms": {"data_wait": 32.0}, "loader": loader(wait_ms=32.0, epochs=1, first_wait_ms=3000.0)}
    again = {**first, "loader": loader(wait_ms=32.0, epochs=2, first_wait_ms=1500.0)}

    assert rules(window(rank(**first, facts=facts(loader={"persistent_workers": False})))) == []
    assert rules(window(rank(**again, facts=facts()))) == []
    assert rules(window(rank(**again, facts=facts(loader={"persistent_workers": None})))) == []


def test_workers_that_persist_are_started_anew_with_each_new_loader() -> None:
    """Made in the loop over epochs, or by a trainer that is told to reload it."""
    waits = {"phases_ms": {"data_wait": 32.0}, "loader": loader(wait_ms=32.0, epochs=2, first_wait_ms=1500.0)}
    (found,) = advise(window(rank(**waits, facts=facts(loader={"made_anew": True}))))

    assert rules(window(rank(**waits, facts=facts(loader={"made_anew": False})))) == []
    assert found.rule == "dataloader-workers-restarted"
    assert found.advice.startswith("Keep the DataLoader")


@pytest.mark.parametrize(
    ("shared_ms", "shared_faults", "copies_s"),
    [(400.0, 200_000, 0.3), (400.0, 5_000, 0.05), (100.0, 200_000, 0.0)],
    ids=["page by page", "the rest has another cause", "a step like the others"],
)
def test_pages_that_are_copied_after_the_start_of_workers_are_a_part_of_its_cost(
    shared_ms: float, shared_faults: int, copies_s: float
) -> None:
    """Four steps of a hundred; the others take 100 ms without the wait."""
    seen = loader(
        wait_ms=32.0, epochs=4, first_wait_ms=700.0, restarts=4, shared_ms=shared_ms, shared_faults=shared_faults
    )
    more_ms = 4 * (shared_ms - 100.0) / STEPS
    phases_ms = dict.fromkeys(HEALTHY_MS, 0.0) | {"data_wait": 32.0, "forward": 100.0 + more_ms}
    (found,) = advise(window(rank(phases_ms=phases_ms, loader=seen, facts=facts(loader={"persistent_workers": False}))))

    assert found.evidence["page_copies_seconds"] == pytest.approx(copies_s)
    assert ("copies of memory pages" in found.advice) == (copies_s > 0.1)


@pytest.mark.parametrize(
    ("fetching_lines", "line"),
    [
        ({"data.py:30": 5, "data.py:31": 1}, 30),
        ({"data.py:30": 3}, 41),
        ({"data.py:30": 4, "data.py:31": 3}, 41),
        ({"data.py:70": 12, "data.py:60": 12, "data.py:30": 10, "data.py:31": 4}, 30),
        ({"data.py:70": 12, "data.py:30": 12}, 30),
        ({"data.py:70": 12, "data.py:31": 8, "data.py:32": 4}, 70),
        ({"data.py:30": 7, "data.py:31": 6}, 30),
    ],
    ids=[
        *("most", "few samples", "spread over many lines", "what it calls holds nearly all", "or all"),
        *("what it calls is spread", "lines that do not call each other"),
    ],
)
def test_a_slow_transform_is_at_the_line_that_holds_the_fetches(fetching_lines: dict[str, int], line: int) -> None:
    slow = starved(cores=1.5)
    (one,) = slow.ranks
    sampled = replace(one, fetches=14, fetching=fetching_lines, calls={"data.py:30": "PIL.Image.resize"})

    (found,) = advise(replace(slow, ranks=(sampled,)))

    assert (found.rule, found.line) == ("dataloader-slow-transform", line)
    assert found.evidence.get("call") == ("PIL.Image.resize" if line == 30 else None)


def test_a_few_samples_in_logging_are_no_verdict() -> None:
    """Four of twenty: it may be a tenth, or a third."""
    guess = rank(samples=20, logged={"train.py:88": 4})

    assert rules(window(guess)) == []


def test_lines_that_follow_each_other_are_one_loss_at_the_first_that_holds_much_of_it() -> None:
    lines = {"db.py:33": 4, "db.py:34": 10, "db.py:35": 12, "db.py:37": 2, "other.py:36": 30}
    calls = {"db.py:34": "db.executemany", "db.py:35": "sqlite3.commit", "db.py:33": "sqlite3.connect"}
    found = advise(window(rank(samples=100, calling=lines, calls={**calls, "other.py:36": "json.dump"})))

    assert {(each.file, each.line, each.evidence["samples_in_line"], each.evidence.get("lines")) for each in found} == {
        ("db.py", 34, 26, "33-35"),
        ("other.py", 36, 30, None),
    }


def test_a_line_that_works_on_tensors_is_not_one_with_the_call_below_it() -> None:
    lines, calls = {"train.py:10": 30, "train.py:11": 35}, {"train.py:10": "update", "train.py:11": "json.dump"}
    (on_gpu,) = advise(window(rank(samples=100, calling=lines, calls=calls)))
    on_cpu = advise(window(rank(samples=100, calling=lines, calls=calls, gpu=None)))

    assert (on_gpu.line, on_gpu.evidence["samples_in_line"]) == (11, 35)
    assert {(each.line, each.evidence["samples_in_line"]) for each in on_cpu} == {(10, 30), (11, 35)}


def test_where_ranks_wait_for_each_other_in_a_line_it_costs_what_it_takes_the_last_one() -> None:
    """DDP's buffers: rank 0 waits 40 % of its steps for rank 1, and both send for 20 % of them."""
    calls = {"train.py:88": "torch.nn.parallel.DistributedDataParallel._sync_buffers"}
    ranks = [
        rank(number, gpu=None, samples=200, calling={"train.py:88": samples}, calls=calls)
        for number, samples in enumerate((120, 40))
    ]

    (found,) = advise(window(*ranks))

    assert (found.rule, found.ranks) == ("hot-line", (0, 1))
    assert found.seconds_per_step == pytest.approx(0.2 * ranks[1].step_s)
    assert (found.file, found.line) == ("train.py", 88)
    assert "broadcast_buffers=False" in found.advice
    made = [replace(each, facts={**each.facts, "ddp": {"site": "model.py:7 wrap"}}) for each in ranks]
    (found,) = advise(window(*made))
    assert (found.file, found.line) == ("model.py", 7)


@pytest.mark.parametrize(
    ("call", "with_backward"),
    [("differences of pairs", True), ("largest singular value", True), ("permutation", False)],
)
def test_distances_of_all_pairs_cost_their_part_of_backward_too(call: str, *, with_backward: bool) -> None:
    """15 % of the step is half of forward, so half of backward goes with it."""
    seen = rank(phases_ms={"forward": 30.0, "backward": 40.0}, samples=100, calls={"train.py:88": call}, gpu=None)
    seen = replace(seen, calling={"train.py:88": round(100 * 0.015 / seen.step_s)})

    (found,) = advise(window(seen))

    line_s = seen.calling["train.py:88"] / 100 * seen.step_s
    assert found.seconds_per_step == pytest.approx(line_s + (line_s / 0.030 * 0.040 if with_backward else 0.0))
    assert found.evidence["call"] == call


@pytest.mark.parametrize(("nodes", "checks_ms"), [(400, 400 * 5e-3 + 2 * 500_000 * 2e-6), (10_000, 0.8 * 40.0)])
def test_anomaly_mode_costs_its_checks_in_backward_too(nodes: int, checks_ms: float) -> None:
    seen = rank(
        phases_ms={"backward": 40.0},
        microsteps=STEPS,
        samples=100,
        calling={"train.py:88": 30},
        calls={"train.py:88": "torch.autograd.set_detect_anomaly"},
        facts=facts(graph={"nodes": nodes}, gradients={"elements": 500_000}),
        gpu=None,
    )

    (found,) = advise(window(seen))

    assert found.seconds_per_step == pytest.approx(0.3 * seen.step_s + checks_ms / 1e3)


@pytest.mark.parametrize(("logging", "is_told"), [(19, False), (28, True)])
def test_a_share_counts_without_its_standard_error(logging: int, *, is_told: bool) -> None:
    """One `self.log` in a small Lightning step takes a twentieth, give or take a quarter of that."""
    seen = rank(samples=364, logged={"train.py:88": logging})

    assert rules(window(seen)) == ["logging-stall"] * is_told


def test_lines_that_follow_each_other_are_told_apart_if_something_else_is_to_be_done_about_them() -> None:
    calls = {"train.py:88": "differences of pairs", "train.py:89": "the same in every step"}
    seen = rank(samples=100, calling={"train.py:88": 30, "train.py:89": 30}, calls=calls, gpu=None)

    assert sorted(found.line or 0 for found in advise(window(seen))) == [88, 89]


def test_a_line_that_the_gpu_does_not_wait_for_costs_nothing() -> None:
    """The host may be ahead of its GPU: what it does then is hidden, and a line of tensor operations only waits."""
    dumps = {"samples": 20, "calling": {"train.py:88": 15}, "calls": {"train.py:88": "json.dump"}}
    averages = {**dumps, "calls": {"train.py:88": "update"}}
    busy, idle = (gpu(utilization_ratio=ratio) for ratio in (0.99, 0.80))

    assert rules(window(rank(**dumps), gpus=(busy,))) == []
    (found,) = advise(window(rank(**dumps), gpus=(idle,)))
    assert (found.rule, found.evidence["call"]) == ("hot-line", "json.dump")
    assert found.seconds_per_step == pytest.approx(0.02)
    assert rules(window(rank(**averages), gpus=(idle,))) == []
    assert rules(window(rank(gpu=None, **averages))) == ["hot-line"]


def test_what_is_the_same_in_every_step_is_told_where_no_gpu_computes_it() -> None:
    line = {"samples": 40, "calling": {"train.py:88": 30}, "calls": {"train.py:88": "the same in every step"}}

    (found,) = advise(window(rank(gpu=None, **line)))

    assert found.rule == "hot-line"
    assert "Compute it once" in found.advice
    assert rules(window(rank(**line), gpus=(gpu(utilization_ratio=0.80),))) == []


def test_more_ranks_than_cores_are_not_told_to_use_fewer_threads_than_one() -> None:
    """The ranks wait for cores, and each computes with one thread already."""
    waits = {"trainer_cpu_s": 100.0, "trainer_runqueue_s": 100.0, "facts": facts(torch_threads=1)}
    assert "omp-oversubscribed" not in rules(window(*(rank(rank=number, **waits) for number in range(64))))
    waits["facts"] = facts(torch_threads=4)
    assert "omp-oversubscribed" in rules(window(*(rank(rank=number, **waits) for number in range(64))))


def test_threads_that_only_exist_oversubscribe_nothing() -> None:
    assert rules(window(rank(facts=facts(torch_threads=64)))) == []
    assert rules(window(rank(facts=facts(torch_threads=64), trainer_cpu_s=1.0, trainer_runqueue_s=2.0))) == []


def test_where_the_kernel_counts_no_run_queue_full_cores_and_pressure_tell() -> None:
    """64 threads on 16 cores: three of four wait."""
    many = rank(facts=facts(torch_threads=64), trainer_cpu_s=150.0, trainer_runqueue_s=None)

    (found,) = advise(window(many, pressure_s={("cpu", "some"): 9.9}))

    assert (found.rule, found.evidence["waiting_ratio"]) == ("omp-oversubscribed", 0.75)
    assert rules(window(many)) == []


def test_collections_outside_of_steps_are_no_loss() -> None:
    assert rules(window(rank(pauses=replace(NO_PAUSES, gc_collections=10, gc_ns_total=900 * STEPS * MS)))) == []


def test_a_power_cap_is_no_throttling() -> None:
    assert rules(window(gpus=(gpu(0, throttle_s={"power_cap": 10.0, "sync_boost": 10.0}), gpu(1)))) == []


def test_without_the_gpus_node_there_is_no_mismatch() -> None:
    assert rules(window(rank(cpu_nodes=frozenset({1})), gpus=(gpu(numa_node=None),))) == []


@pytest.mark.parametrize(
    ("seen", "told"),
    [(None, (None, None)), ({}, (0, 0)), ({5001: 6 * MIB, 5002: 2 * MIB}, (8 * MIB, 6 * MIB))],
)
def test_batches_are_evidence_by_the_worker_that_made_them_where_they_may_be_seen(
    seen: dict[int, int] | None, told: tuple[int | None, int | None]
) -> None:
    full = host(shm_size_bytes=64 * MIB, shm_used_bytes=60 * MIB)

    (found,) = advise(window(rank(shm_inflight_bytes=seen), host=full))

    assert found.rule == "shm-nearly-full"
    assert (found.evidence.get("in_flight_bytes"), found.evidence.get("most_of_a_worker_bytes")) == told


# --- a sampler


def test_a_wait_for_a_sampler_is_not_one_for_workers() -> None:
    """The training thread draws the indices: workers would wait for them, too."""
    waiting = {
        "phases_ms": {"data_wait": 40.0},
        "loader": loader(workers=0, wait_ms=40.0),
        "workers": fetching(batches=0),
        "facts": facts(loader={"num_workers": 0}),
        "gpu": None,
        "samples": 100,
    }
    line = {"calling": {"data.py:44": 28}, "calls": {"data.py:44": "random.shuffle"}, "indexing": 28}

    assert rules(window(rank(**waiting))) == ["dataloader-too-few-workers"]
    assert rules(window(rank(**{**waiting, **line}))) == ["hot-line"]


# --- loops


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": 150},
        {"nodes": 400},
        {"facts": facts(device=None)},
        {"looping": {"train.py:88": 4}},
        {"looping": {"train.py:88": 11}},
        {"before_backward": 400, "samples": 700},
        {"backward": {}},
    ],
    ids=[
        "a small graph",
        "long nodes",
        "no graph",
        "a small loop",
        "less than a third",
        "few of many samples",
        "no sample in backward",
    ],
)
def test_a_loop_is_none_of_small_operations_without_the_evidence_for_it(changes: dict[str, Any]) -> None:
    assert rules(window(looping_rank(**changes))) == []
    assert rules(window(looping_rank())) == ["small-operations-loop"]


def test_nodes_that_are_long_because_others_use_the_cores_are_short() -> None:
    """The rank has a core in a fifth of the time in which it wants one."""
    slow = looping_rank(nodes=400, trainer_cpu_s=2.0, trainer_runqueue_s=8.0)
    (found,) = advise(window(slow))

    assert found.rule == "small-operations-loop"
    assert found.evidence["seconds_per_graph_node"] == pytest.approx(10e-6)


def test_of_longer_nodes_only_torchs_own_part_is_lost() -> None:
    (found,) = advise(window(looping_rank(nodes=1000)))

    assert found.seconds_per_step == pytest.approx(15 / 20 * 0.040, rel=0.01)


def test_loops_that_begin_on_lines_that_follow_each_other_end_with_the_last() -> None:
    lines = {"looping": {"train.py:88": 20, "train.py:89": 12}, "loop_ends": {"train.py:88": 88, "train.py:89": 95}}
    (found,) = advise(window(looping_rank(**lines)))

    assert (found.line, found.evidence["lines"], found.evidence["samples_in_loop"]) == (88, "88-95", 32)


def test_nodes_are_those_of_all_backward_passes_of_a_step() -> None:
    assert rules(window(looping_rank(nodes=400, microsteps=5 * STEPS))) == ["small-operations-loop"]


def test_a_loop_costs_no_more_than_the_gpu_is_idle() -> None:
    has_gpu = {"facts": facts(graph={"nodes": 2000, "at_least": True})}
    idle = gpu(0, utilization_ratio=0.6)
    (found,) = advise(window(looping_rank(**has_gpu), gpus=(idle,)))

    assert found.seconds_per_step == pytest.approx(0.4 * 0.066)
    assert "at least 2000 nodes" in found.advice
    assert rules(window(looping_rank(**has_gpu), gpus=(gpu(0, utilization_ratio=0.95),))) == []


# --- communication and precision


def test_small_collectives_cost_what_those_after_the_first_one_of_a_step_take() -> None:
    """Ranks whose batches differ wait for each other in the first one, all of them: that wait would only move."""
    calls = {"count": 4 * STEPS, "blocked_ns": 13 * STEPS * MS, "gpu_ns": STEPS * MS // 2}
    ranks = [rank(number, phases_ms={"comm": 13.0}, sites=(site("small_collective", **calls),)) for number in range(4)]

    assert rules(window(*ranks)) == []


def test_collectives_of_a_few_numbers_now_and_then_are_a_log() -> None:
    now_and_then = site("small_collective", count=STEPS, blocked_ns=20 * STEPS * MS)

    assert rules(window(rank(phases_ms={"comm": 20.0}, sites=(now_and_then,)))) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": facts(ddp={"modules": 2, "reductions_per_step": 4})},
        {"facts": facts(ddp={"modules": 1, "reductions_per_step": 4}), "microsteps": STEPS},
        {"facts": facts(ddp={"modules": 1, "reductions_per_step": 4}), "phases_ms": {"comm": 1.0}},
    ],
    ids=["two modules, each with its own backward", "two forwards before one backward", "all of it overlaps"],
)
def test_several_reductions_in_a_step_may_be_needed(changes: dict[str, Any]) -> None:
    reduces = {"gpu": None, "phases_ms": {"comm": 40.0}, "microsteps": 4 * STEPS, **changes}

    assert rules(window(rank(**reduces))) == []


def test_communication_that_overlaps_takes_its_time_from_backward_where_all_cores_are_busy() -> None:
    logged = replace(NO_PAUSES, ddp_comm_ns=16 * MS, ddp_overlap_ns=6 * MS)
    ddp = facts(ddp={"modules": 1, "reductions_per_step": 4})
    reduces = rank(gpu=None, phases_ms={"comm": 40.0}, microsteps=4 * STEPS, facts=ddp, pauses=logged)

    (found,) = advise(window(reduces))
    assert found.seconds_per_step == pytest.approx(0.030)
    (found,) = advise(window(reduces, cores=2.0))
    assert found.seconds_per_step == pytest.approx(0.030 + 0.75 * 4 * 0.006)


def test_on_a_gpu_only_the_communication_that_does_not_overlap_is_lost() -> None:
    ddp = facts(ddp={"modules": 1, "reductions_per_step": 2})
    logged = replace(NO_PAUSES, ddp_comm_ns=25 * MS, ddp_overlap_ns=5 * MS)

    (found,) = advise(window(rank(facts=ddp, microsteps=2 * STEPS, pauses=logged)))

    assert found.rule == "reduced-in-accumulation"
    assert found.seconds_per_step == pytest.approx(0.020)


def fsdp(*, reductions: float, gathers: float) -> RankWindow:
    """A rank in which each reduction of gradients takes 10 ms."""
    ratios = {"reductions_per_step": reductions, "gathers_per_reduction": gathers, "seconds_per_reduction": 0.010}
    return rank(gpu=None, phases_ms={"comm": 60.0}, facts=facts(fsdp=ratios), backward={"train.py:88": 9})


@pytest.mark.parametrize(("reductions", "gathers", "saves_ms"), [(4.0, 1.0, 30.0), (4.0, 2.0, 30.0), (9.0, 2.0, 60.0)])
def test_fsdp_that_reduces_in_accumulation_steps_is_told(reductions: float, gathers: float, saves_ms: float) -> None:
    (found,) = advise(window(fsdp(reductions=reductions, gathers=gathers)))

    assert (found.rule, found.line) == ("reduced-in-accumulation", 88)
    assert 1e3 * found.seconds_per_step == pytest.approx(saves_ms)


@pytest.mark.parametrize(("reductions", "gathers"), [(1.0, 1.0), (1.0, 4.0), (2.0, 1.0), (4.0, 4.0)])
def test_fsdp_that_reduces_once_or_may_do_so_is_left_alone(reductions: float, gathers: float) -> None:
    assert rules(window(fsdp(reductions=reductions, gathers=gathers))) == []


def test_a_long_validation_that_fills_the_window_is_told_by_its_part_of_the_whole_run() -> None:
    (found,) = advise(window(rank(phases_ms={"validation": 2000.0}, validation_share=0.3)))

    assert found.rule == "frequent-validation"
    assert found.advice.startswith("30% of the time is validation: 10% if it is 4 times less often")


def test_double_precision_that_is_asked_for_is_left_alone() -> None:
    meant = {"parameters": "float64", "default": "float32", "optimizer": "LBFGS", "autocast": False}

    assert rules(window(rank(facts=facts(precision=meant)))) == []
    assert rules(window(rank(facts=facts(precision={**meant, "optimizer": "Adam"})))) == ["float64-parameters"]
    assert rules(window(rank(facts=facts(precision={**meant, "optimizer": "Adam", "autocast": "bfloat16"})))) == []


@pytest.mark.parametrize(("call", "told"), [("Python code", ["hot-line"]), ("accuracy", [])])
def test_on_a_gpu_a_line_is_told_that_computes_with_no_tensor(call: str, told: list[str]) -> None:
    """Another one may wait for the GPU."""
    line = {"samples": 20, "calling": {"train.py:88": 15}, "calls": {"train.py:88": call}}

    assert rules(window(rank(**line))) == told


@pytest.mark.parametrize(
    ("gathers", "size_kib", "is_told"),
    [(13, 32, True), (7, 32, False), (13, 80, False), (13, 0, False)],
    ids=["single layers", "few units", "blocks", "an older rank, which does not say"],
)
def test_units_of_fsdp_are_too_small_if_there_are_many(gathers: float, size_kib: float, *, is_told: bool) -> None:
    found = advise(window(sharded_rank(gathers=gathers, size_kib=size_kib)))

    assert [each.rule for each in found] == ["fsdp-small-units"] * is_told
