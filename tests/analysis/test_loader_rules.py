"""What is told of dataloaders besides the number of their workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from healthy_node import HEALTHY_MS, MIB, OWN_MS, STEPS, facts, fetching, loader, rank, rules, starved, window
from rule_cases import CASES

from gpulaunch.profiler.analysis.advisor import advise
from gpulaunch.profiler.analysis.fetch_lines import dropped_share
from gpulaunch.profiler.record.line_calls import OTHER_PARTS, OTHER_RANKS, OTHER_WORKERS


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


def test_forked_workers_must_not_share_what_a_dataset_holds_open() -> None:
    fault = CASES["dataloader-too-few-workers"].fault
    alone = [
        replace(
            each,
            loader=replace(each.loader, workers_configured=0) if each.loader else None,
            stall=replace(each.stall, kind="no_workers"),
            facts=facts(loader={"num_workers": 0}),
        )
        for each in fault.ranks
    ]
    holding = [replace(each, facts=facts(loader={"num_workers": 0, "holds": "an open socket"})) for each in alone]

    assert rules(replace(fault, ranks=tuple(alone))) == ["dataloader-too-few-workers"]
    assert "dataloader-too-few-workers" not in rules(replace(fault, ranks=tuple(holding)))


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


def test_the_first_epoch_has_to_start_its_workers_and_persistent_ones_stay() -> None:
    first = {"phases_ms": {"data_wait": 32.0}, "loader": loader(wait_ms=32.0, epochs=1, first_wait_ms=3000.0)}
    again = {**first, "loader": loader(wait_ms=32.0, epochs=2, first_wait_ms=1500.0)}

    assert rules(window(rank(**first, facts=facts(loader={"persistent_workers": False})))) == []
    assert rules(window(rank(**again, facts=facts()))) == []
    assert rules(window(rank(**again, facts=facts(loader={"persistent_workers": None})))) == []
    assert rules(window(rank(**again, facts=facts(loader={"persistent_workers": False})))) != []
    assert rules(window(rank(**again, facts=facts(loader={"persistent_workers": False, "changes": True})))) == []


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


def test_of_one_rank_no_samples_are_dropped() -> None:
    """The line still holds the fetches, but nothing says what it calls."""
    fault = CASES["dataloader-samples-dropped"].fault

    (found,) = advise(replace(fault, ranks=fault.ranks[:1]))

    assert found.rule == "dataloader-too-few-workers"
    assert found.evidence["line_ratio"] == 0.9
    assert "call" not in found.evidence


@pytest.mark.parametrize(("whose", "kept"), [(OTHER_RANKS, 2), (OTHER_WORKERS, 4), (OTHER_PARTS, 8)])
def test_what_is_dropped_is_what_each_of_the_others_keeps(whose: str, kept: int) -> None:
    sampled = {"fetches": 50, "fetching": {"data.py:7": 45}, "calls": {"data.py:7": whose}}
    one = rank(loader=loader(workers=4), **sampled)

    share, place = dropped_share(one, window(one, replace(one, rank=1)))

    assert share == pytest.approx(0.9 * (1 - 1 / kept))
    assert (place.file, place.line) == ("data.py", 7)
