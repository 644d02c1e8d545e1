"""Which copies and waits for the GPU are told, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from healthy_node import MS, STEPS, gpu, rank, rules, site
from rule_cases import CASES

from gpulaunch.profiler.analysis.advisor import advise
from gpulaunch.profiler.analysis.finding import DERIVED, ESTIMATED


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
