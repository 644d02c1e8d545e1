"""A window is what happened between two snapshots: counts are subtracted, gauges are as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_node import MIB, MS, Node, Rank, device, workers

from gpulaunch.profiler.analysis.advisor import advise
from gpulaunch.profiler.analysis.difference import between
from gpulaunch.profiler.analysis.window import MemoryPoint
from gpulaunch.profiler.record import CopyTotals, Site


def site(count: int, text: str = "train.py:8 f") -> Site:
    return Site(
        kind="h2d",
        text=text,
        count=count,
        size_bytes=count * MIB,
        blocked_ns=count * MS,
        gpu_ns=0,
        pinned=count,
        non_blocking=0,
    )


def copied(count: int) -> dict[tuple[str, str], CopyTotals]:
    return {("h2d", "pinned"): CopyTotals(count=count, size_bytes=count * MIB, blocked_ns=count * MS, gpu_ns=count)}


@pytest.fixture
def node() -> Node:
    node = Node()
    node.train(10)
    return node


def test_steps_and_phases_are_those_of_the_window(node: Node) -> None:
    before = node.look()

    window = between(before, node.train(5, forward=60.0))

    (rank,) = window.ranks
    assert (window.seconds, rank.steps) == (5.0, 50)
    assert rank.step_s == pytest.approx(0.120)
    assert rank.phase_s("forward") == pytest.approx(0.060)
    assert rank.phase_s("no such phase") == 0.0
    assert rank.loader is not None
    assert (rank.loader.batches, rank.loader.wait_ns_total, rank.loader.outstanding) == (50, 50 * MS, 4)
    assert sum(rank.loader.wait_counts) == 50


def test_cpu_time_is_that_of_the_window_and_its_queue_only_where_it_is_counted(node: Node) -> None:
    before = node.look()
    node.ranks[0].runqueue_s = 3.0
    (uncounted,) = between(before, node.train(5)).ranks
    counted_before = node.look()
    node.ranks[0].runqueue_s = 4.5

    (rank,) = between(counted_before, node.train(5)).ranks

    assert (rank.trainer_cpu_s, rank.workers_cpu_s) == pytest.approx((2.5, 1.25))
    assert (uncounted.trainer_runqueue_s, rank.trainer_runqueue_s) == (None, 1.5)


def test_the_time_of_the_first_thread_is_that_of_one_process(node: Node) -> None:
    seen: list[float | None] = []
    for main_s in (None, 3.0, 5.5, 1.0):  # the last one is of another process
        before = node.look()
        node.ranks[0].main_thread_s = main_s
        seen.append(between(before, node.train(5)).ranks[0].main_thread_s)

    assert seen == [None, None, 2.5, None]


def test_pauses_and_memory_keep_their_gauges(node: Node) -> None:
    node.ranks[0].gpu_bytes = 100 * MIB
    before = node.look()
    node.ranks[0].gpu_bytes = 300 * MIB
    node.ranks[0].gc += 4
    node.ranks[0].saves += 2

    (rank,) = between(before, node.train(5)).ranks

    assert (rank.pauses.gc_collections, rank.pauses.gc_ns_total, rank.pauses.ddp_comm_ns) == (4, 4 * MS, 7)
    assert rank.gpu is not None
    assert (rank.gpu.allocated_bytes, rank.gpu.alloc_retries) == (300 * MIB, 50)
    assert rank.saves == 2


def test_copies_and_lines_are_those_of_the_window(node: Node) -> None:
    one = node.ranks[0]
    one.sites, one.copies = (site(10), site(3, "train.py:9 f")), copied(10)
    before = node.look()
    one.sites, one.copies = (site(15), site(3, "train.py:9 f"), site(1, "new.py:1 g")), copied(15)

    (rank,) = between(before, node.train(5)).ranks

    assert [(each.text, each.count, each.size_bytes, each.pinned) for each in rank.sites] == [
        ("train.py:8 f", 5, 5 * MIB, 5),
        ("new.py:1 g", 1, MIB, 1),
    ]
    assert rank.copies == copied(5)


def test_copies_of_steps_that_were_not_observed_are_told_as_equal_to_the_others(node: Node) -> None:
    """Of 80 steps 20 were observed; a save is seen in any."""
    one = node.ranks[0]
    one.sites, one.copies = (site(10),), copied(10)
    before = node.look()
    one.sites = (site(12), replace(site(1, "train.py:9 f"), kind="save"))
    one.copies, one.unobserved_steps = copied(12), 60

    (rank,) = between(before, node.train(8)).ranks

    assert [(each.kind, each.count) for each in rank.sites] == [("h2d", 8), ("save", 1)]
    assert rank.copies == copied(8)


def test_a_line_of_another_page_counts_whole(node: Node) -> None:
    """The rank's script ran another program, and its page began again."""
    node.ranks[0].sites = (site(10),)
    before = node.look()
    node.ranks[0].sites = (site(4),)

    (rank,) = between(before, node.train(5)).ranks

    assert [each.count for each in rank.sites] == [4]


def test_what_workers_did_is_that_of_the_window(node: Node) -> None:
    one = node.ranks[0]
    one.workers = workers(batches=10, wall_ns=100, cpu_ns=80, blocked_ns=20, storage_bytes=7)
    before = node.look()
    one.workers = workers(batches=30, wall_ns=500, cpu_ns=180, blocked_ns=320, storage_bytes=9)

    (rank,) = between(before, node.train(5)).ranks

    assert rank.workers == workers(batches=20, wall_ns=400, cpu_ns=100, blocked_ns=300, storage_bytes=2)


def test_the_verdict_on_the_wait_is_there() -> None:
    node = Node()
    before = node.train(10)
    node.ranks[0].workers = workers(batches=50, wall_ns=900, cpu_ns=800, blocked_ns=100)

    (rank,) = between(before, node.train(5, data_wait=200.0)).ranks

    assert rank.stall.kind == "prep"
    assert rank.stall.share == pytest.approx(200 / 299)


def test_a_queue_that_is_not_read_is_not_one_without_workers() -> None:
    """Out of service, it leaves the page saying "no workers", as the loader for evaluation has."""
    loader = {"site": "train.py:41 main", "split": "train", "num_workers": 4}
    evaluates = {"site": "eval.py:7 evaluate", "split": "eval", "num_workers": 0}

    def found_with(**off: tuple[str, ...]) -> list[tuple[str, str | None]]:
        node = Node(ranks=[Rank(workers_configured=0, facts={"loaders": [loader, evaluates]}, **off)])
        return [(each.rule, each.file) for each in advise(between(node.train(10), node.train(5, data_wait=200.0)))]

    assert found_with() == [("dataloader-too-few-workers", "eval.py")]
    assert found_with(hooks_off=("loader_queue",)) == []


def test_a_rank_that_has_not_stepped_enough_is_left_out(node: Node) -> None:
    node.ranks.append(Rank(rank=1))
    before = node.look()
    after = node.train(5)
    stuck = replace(after.state.training[1], steps=2)
    after = replace(after, state=replace(after.state, training=(after.state.training[0], stuck)))

    assert [rank.rank for rank in between(before, after, least_steps=4).ranks] == [0]
    assert [rank.rank for rank in between(before, after, least_steps=1).ranks] == [0, 1]


def test_a_rank_that_was_not_there_before_is_left_out(node: Node) -> None:
    before = node.look()
    node.ranks.append(Rank(rank=1, steps=500))

    assert [rank.rank for rank in between(before, node.train(5)).ranks] == [0]


def test_pressure_throttling_and_samples_are_those_of_the_window(node: Node) -> None:
    node.devices = (device(throttle_seconds={"thermal": 3.0}),)
    node.extra = {"samples": {0: 5, 1: 9}, "logged": {(0, "a.py:1"): 2, (1, "a.py:1"): 4}}
    node.pressure_s = 10.0
    before = node.look()
    node.devices = (device(throttle_seconds={"thermal": 4.5, "hw_thermal": 1.0}),)
    node.extra = {
        "samples": {0: 8, 1: 9},
        "logged": {(0, "a.py:1"): 2, (1, "a.py:1"): 4, (0, "a.py:7"): 1},
        "calling": {(0, "a.py:9"): 3},
        "calls": {(0, "a.py:9"): "json.dump", (1, "b.py:9"): "json.load"},
    }
    node.pressure_s = 12.0

    window = between(before, node.train(5))

    assert window.pressure("cpu") == pytest.approx(0.4)
    assert window.pressure("io") is None
    assert window.gpus[0].throttle_s == {"thermal": 1.5, "hw_thermal": 1.0}
    assert window.ranks[0].samples == 3
    assert window.ranks[0].logged == {"a.py:1": 0, "a.py:7": 1}
    assert (window.ranks[0].calling, window.ranks[0].calls) == ({"a.py:9": 3}, {"a.py:9": "json.dump"})


def test_cores_are_those_of_the_mask_or_of_the_quota(node: Node) -> None:
    before = node.look()
    assert between(before, node.train(5)).cores == 16
    node.quota_cores = 2.5
    assert between(before, node.train(5)).cores == 2.5


def test_the_trend_is_handed_on(node: Node) -> None:
    point = MemoryPoint(at_s=1.0, steps=1, trainer_bytes=1, workers_bytes=None, workers_alive=0, gpu_bytes=None)

    (rank,) = between(node.look(), node.train(5), memory={0: (point,)}).ranks

    assert rank.memory == (point,)


def test_samples_of_lines_are_those_of_the_window_and_those_of_loops_of_the_whole_run(node: Node) -> None:
    """What shows that a loop makes no steps comes late, and then says so of all of its samples."""
    line, loop = (0, "train.py:8"), (0, "train.py:20")
    before = replace(node.look(), samples={0: 50}, calling={line: 10}, before_backward={0: 30}, looping={loop: 20})
    after = replace(node.train(5), samples={0: 90}, calling={line: 25}, before_backward={0: 55}, looping={loop: 44})

    (rank,) = between(before, replace(after, loop_ends={loop: 23, (1, "train.py:20"): 99})).ranks

    assert (rank.samples, rank.calling) == (40, {"train.py:8": 15})
    assert (rank.before_backward, rank.looping, rank.loop_ends) == (55, {"train.py:20": 44}, {"train.py:20": 23})


def test_waits_for_the_gil_are_those_of_the_window_and_their_lines_those_of_the_whole_run(node: Node) -> None:
    watch, line = (0, "train.py watch", ""), (0, "train.py watch", "train.py:8")
    before = replace(node.look(), gil_waits={watch: 10, line: 9}, thread_waits={0: 3})
    others = {(1, "train.py watch", ""): 50}
    after = replace(node.train(5), gil_waits={watch: 25, line: 20, **others}, thread_waits={0: 5, 1: 9})

    (rank,) = between(before, after).ranks

    assert (rank.gil_waits, rank.thread_waits) == ({"train.py watch": 15}, 2)
    assert rank.gil_lines == {("train.py watch", ""): 25, ("train.py watch", "train.py:8"): 20}


def test_samples_count_for_the_innermost_line_that_always_holds_the_gil(node: Node) -> None:
    """It may be believed in the middle of a window: those of the window count, and no others."""
    outer, python, tensors = (0, "train.py:8"), "train.py:20", "train.py:30"
    seen = {(0, python, "train.py:8"): 9, (0, python, ""): 3, (0, tensors, ""): 5, (1, python, ""): 7}
    before = replace(node.look(), calling={outer: 10}, innermost=seen)
    later = {key: count + 6 for key, count in seen.items()}
    after = replace(node.train(5), calling={outer: 20}, innermost=later, holding_gil=frozenset({(0, python)}))

    (rank,) = between(before, after).ranks

    assert rank.calling == {"train.py:8": 4, python: 12}
    assert rank.calls[python] == "Python code"
