"""What counts as growth, and when memory is called full."""

from __future__ import annotations

from dataclasses import replace

import pytest
from healthy_node import MIB, STEPS, gpu, gpu_memory, host, memory, rank, rules, window

from gpulaunch.profiler.analysis.advisor import advise


def test_memory_that_grew_once_and_stays_is_no_growth() -> None:
    points = memory(points=16, trainer_mib=100)
    filled = tuple(replace(point, trainer_bytes=min(point.trainer_bytes, 2600 * MIB)) for point in points)

    assert rules(window(rank(memory=points))) == ["host-memory-growth"]
    assert rules(window(rank(memory=filled))) == []


def test_memory_that_was_allocated_before_is_filled_and_does_not_grow() -> None:
    points = memory(points=16, trainer_mib=100)
    before = tuple(replace(point, trainer_virtual_bytes=(9000 + at) * MIB) for at, point in enumerate(points))
    grows = tuple(replace(point, trainer_virtual_bytes=(9000 + 100 * at) * MIB) for at, point in enumerate(points))

    assert rules(window(rank(memory=before))) == []
    assert rules(window(rank(memory=grows))) == ["host-memory-growth"]


@pytest.mark.parametrize(
    ("epoch_batches", "room_mib", "is_told"),
    [
        (10 * STEPS, 1600, False),
        (10 * STEPS, 300, True),
        (10_000 * STEPS, 1200, True),
        (3 * STEPS, 1200, True),
        (6 * STEPS, 1200, False),
        (None, 1200, True),
    ],
    ids=["fits", "fills most of the rest", "a long epoch", "goes on after it", "too short after it", "not known"],
)
def test_what_the_first_epoch_may_fill_is_told_if_it_goes_on_or_does_not_fit(
    epoch_batches: int | None, room_mib: int, *, is_told: bool
) -> None:
    """Eight windows, each 100 MiB more; a cache of the dataset grows until each sample was in it once."""
    node = host(cgroup_limit_bytes=4000 * MIB, cgroup_used_bytes=(4000 - room_mib) * MIB)
    for points in (memory(trainer_mib=100), memory(allocated_mib=100)):
        grows = rank(memory=points, facts={"loaders": [{"epoch_batches": epoch_batches}]})

        assert rules(window(grows, host=node)) == (["host-memory-growth"] if is_told else [])


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
