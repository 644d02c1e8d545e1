"""The verdict on a wait for data: measured cases, and what must hold for all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.analysis.stall import LEAST_SHARE, verdict


def a_window(**more: Any) -> dict[str, int]:
    """A window in which training waited for half of its time, for workers that did nothing."""
    return {
        "step_ns": 10_000,
        "data_wait_ns": 5_000,
        "loader_wait_ns": 5_000,
        "transfer_ns": 0,
        "reorder_ns": 0,
        "workers": 2,
        "cpu_ns": 0,
        "runqueue_ns": 0,
        "blocked_ns": 0,
        **more,
    }


@pytest.mark.parametrize(
    ("dataset", "workers", "cpu", "runqueue", "blocked", "kind"),
    [
        ("computes", 1, 87, 12, 1, "prep"),
        ("computes", 2, 50, 49, 1, "contention"),
        ("computes", 8, 19, 81, 0, "contention"),
        ("waits", 2, 1, 3, 96, "fetch"),
        ("computes a little", 2, 30, 5, 65, "fetch"),
        ("waits, on a busy machine", 8, 10, 35, 55, "fetch"),
    ],
)
def test_where_the_workers_time_goes_says_what_training_waits_for(dataset, workers, cpu, runqueue, blocked, kind):
    """The first four were measured on two cores."""
    found = verdict(**a_window(workers=workers, cpu_ns=cpu, runqueue_ns=runqueue, blocked_ns=blocked))

    assert (found.kind, found.share) == (kind, 0.5)
    assert found.parts_ns["prep"] == 50 * cpu


def test_without_workers_that_is_the_matter():
    found = verdict(**a_window(workers=0))

    assert (found.kind, found.share, found.parts_ns) == ("no_workers", 0.5, {"no_workers": 5_000})


@pytest.mark.parametrize(("workers", "wait_ns"), [(2, 199), (0, 199), (2, 0)])
def test_a_program_that_hardly_waits_has_no_stall(workers, wait_ns):
    busy = {"cpu_ns": 80, "runqueue_ns": 20, "transfer_ns": wait_ns}

    assert verdict(**a_window(workers=workers, data_wait_ns=wait_ns, **busy)).kind == "none"


def test_batches_that_are_ready_and_still_take_time_are_a_matter_of_the_way():
    found = verdict(**a_window(transfer_ns=3_000, reorder_ns=500, cpu_ns=1))

    assert found.kind == "transfer"
    assert (found.parts_ns["transfer"], found.parts_ns["head_of_line"], found.parts_ns["prep"]) == (3_000, 500, 1_500)


def test_batches_that_wait_for_an_earlier_one_are_a_matter_of_order():
    assert verdict(**a_window(reorder_ns=4_000, transfer_ns=500, cpu_ns=1)).kind == "head_of_line"


def test_batches_out_of_order_because_a_worker_has_no_core_are_a_matter_of_cores():
    crowded = verdict(**a_window(reorder_ns=4_000, cpu_ns=60, runqueue_ns=40))
    spacious = verdict(**a_window(reorder_ns=4_000, cpu_ns=80, runqueue_ns=20))

    assert (crowded.kind, crowded.parts_ns["head_of_line"], crowded.parts_ns["contention"]) == ("contention", 0, 2_000)
    assert (spacious.kind, spacious.parts_ns["head_of_line"]) == ("head_of_line", 4_000)


def test_what_was_waited_in_evaluations_is_not_trainings():
    """Half of the time in dataloaders was for evaluation, and so is half of what was transfer there."""
    found = verdict(**a_window(loader_wait_ns=10_000, transfer_ns=4_000, blocked_ns=1))

    assert (found.kind, found.parts_ns["transfer"], found.parts_ns["fetch"]) == ("fetch", 2_000, 3_000)


def test_workers_that_were_not_measured_give_no_verdict():
    found = verdict(**a_window(transfer_ns=1_000))

    assert (found.kind, found.share, found.parts_ns["none"]) == ("none", 0.5, 4_000)


counts = st.integers(0, 1 << 50)


@given(st.fixed_dictionaries(dict.fromkeys(a_window(), counts)))
def test_the_parts_sum_to_the_wait_and_the_kind_is_one_of_them(window):
    found = verdict(**window)

    assert sum(found.parts_ns.values()) == window["data_wait_ns"]
    assert min(found.parts_ns.values()) >= 0
    if found.kind != "none":
        assert found.share >= LEAST_SHARE
        assert found.parts_ns[found.kind] > 0
    elif found.share < LEAST_SHARE:
        assert window["step_ns"] == 0 or window["data_wait_ns"] < window["step_ns"]
