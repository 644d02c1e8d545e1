"""A rank that the others wait for: each cause has a window in which it is named, and one in which it only seems so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from healthy_node import HEALTHY_MS, MS, NO_PAUSES, STEPS, facts, fetching, gpu, loader, rank, rules, window
from made_up_node import Node
from rule_cases import CASES, two_ranks

from gpulaunch.profiler.analysis.advisor import advise
from gpulaunch.profiler.analysis.difference import between
from gpulaunch.profiler.analysis.straggler_rules import straggler
from gpulaunch.profiler.analysis.window import RankWindow, Snapshot, Window
from gpulaunch.profiler.record import GpuTime, Pauses
from rank_records import record

LATE_MS = 30.0
HOT = {"thermal": 9.0}


def late(phase: str, *, ms: float = LATE_MS, **changes: Any) -> RankWindow:
    """Rank 1, which takes longer in a phase; it computes on GPU 1."""
    other_gpu = facts(device={"uuid": "GPU-1", "capability": [9, 0]})
    phases_ms = {phase: HEALTHY_MS[phase] + ms}
    slower = {"workers": fetching(160.0)} if phase == "data_wait" else {}
    return rank(1, phases_ms=phases_ms, **{"facts": other_gpu, **slower, **changes})


def waits(*, ms: float = LATE_MS, **changes: Any) -> RankWindow:
    """Rank 0, which waits for it in backward."""
    return rank(0, phases_ms={"backward": HEALTHY_MS["backward"] + ms}, **changes)


def waits_for_data(ms: float) -> RankWindow:
    """Rank 0 or, if it waits longer than 20 ms for its batches, rank 1, which the other then waits for."""
    number = int(ms > 20.0)
    backward_ms = HEALTHY_MS["backward"] + (0.0 if number else 30.0)
    workers = fetching(160.0 if number else 80.0)
    return rank(number, phases_ms={"data_wait": ms, "backward": backward_ms}, workers=workers)


def cause_of(*ranks: RankWindow, **changes: Any) -> str:
    """The cause, of the one rank that is late."""
    (found,) = straggler(window(*ranks, **changes))
    cause = found.evidence["cause"]
    assert found.subject == "rank 1"
    assert f"cause: {cause}." in found.advice
    return str(cause)


@pytest.mark.parametrize(
    ("own", "of_other", "samples", "line"),
    [
        ({"teach.py:65": 30, "train.py:88": 30}, {"train.py:88": 30}, 40, 65),
        ({"teach.py:65": 30, "train.py:88": 30}, {"train.py:88": 30, "teach.py:65": 1}, 40, None),
        ({"teach.py:65": 30, "train.py:88": 30}, {"train.py:88": 5}, 5, None),
        ({"teach.py:65": 5, "train.py:88": 5}, {"train.py:88": 5}, 40, None),
        ({"teach.py:65": 7, "train.py:88": 70}, {"train.py:88": 30}, 40, None),
        ({}, {}, 40, None),
    ],
    ids=["its own", "also the other's", "few of the other", "few samples", "not why", "no samples"],
)
def test_the_line_that_only_a_late_rank_runs_is_named(
    own: dict[str, int], of_other: dict[str, int], samples: int, line: int | None
) -> None:
    """As where one rank computes for all."""
    at_work = late("forward", gpu=None, around_model=own)

    (found,) = straggler(window(waits(gpu=None, around_model=of_other, samples=samples), at_work, gpus=()))

    assert (found.place.line, "Only it was sampled" in found.advice) == (line, line is not None)
    (found,) = straggler(window(waits(around_model=of_other), replace(at_work, gpu=rank().gpu)))
    assert found.place.line is None, "there it may be where it waits for its GPU"


def test_ranks_that_work_in_turns_have_parts_of_one_model() -> None:
    """Each waits for what the other computes; with a batch of its own, each would compute more."""
    nothing = dict.fromkeys(HEALTHY_MS, 0.0)
    stages = [
        rank(number, gpu=None, facts={}, phases_ms={**nothing, "forward": own_ms, "comm": 100.0 - own_ms})
        for number, own_ms in enumerate((25.0, 75.0))
    ]
    alike = [
        rank(number, gpu=None, facts={}, phases_ms={**nothing, "forward": own_ms, "comm": 100.0 - own_ms})
        for number, own_ms in enumerate((60.0, 95.0))
    ]

    assert list(straggler(window(*stages, gpus=()))) == []
    assert [each.subject for each in straggler(window(*alike, gpus=()))] == ["rank 1"]


def test_ranks_whose_models_are_not_of_a_size_are_not_compared() -> None:
    """Parts of one model, or two models that are trained beside each other."""

    def pair(*elements: int, **more: Any) -> list[str]:
        first, second = ({"gradients": {"elements": each}, **more} for each in elements)
        ranks = waits(gpu=None, facts=first), late("forward", gpu=None, facts=second)
        return [each.subject for each in straggler(window(*ranks, gpus=()))]

    assert pair(500_000, 1_000_000) == []
    assert pair(1_000_000, 1_000_000) == ["rank 1"]
    assert pair(500_000, 1_000_000, ddp={"modules": 1, "world_size": 2}) == ["rank 1"], "each uses a part of it"


def test_a_rank_that_fetches_for_the_others_is_not_late() -> None:
    assert cause_of(waits(), late("data_wait")) == "input"
    assert list(straggler(window(replace(waits(), loader=None), late("data_wait")))) == []


def test_a_rank_that_updates_the_largest_parameter_is_not_late() -> None:
    shards = facts(precision={"optimizer": "ZeroRedundancyOptimizer"})
    assert list(straggler(window(waits(), late("optimizer", facts=shards)))) == []
    assert cause_of(waits(), late("forward", facts=shards)) == "compute"


# --- is it late ---------------------------------------------------------------------------------------------------


def test_it_costs_what_it_is_behind() -> None:
    (found,) = straggler(window(waits(), late("forward")))

    assert found.seconds_per_step == pytest.approx(LATE_MS / 1e3)
    assert found.evidence["forward_excess_seconds_per_step"] == pytest.approx(LATE_MS / 1e3)


def test_who_waits_for_batches_much_longer_than_the_others_is_late_all_the_same() -> None:
    assert cause_of(waits_for_data(20.0), waits_for_data(50.0)) == "input"


@pytest.mark.parametrize(
    "seen",
    [
        window(rank(0), rank(1)),
        window(late("forward")),  # alone
        window(rank(0), late("forward")),  # nobody waits for it: they do not talk
        window(waits(ms=5.0), late("forward", ms=5.0)),  # within what steps differ by
        window(waits(), replace(waits(), rank=1)),  # both wait: for somebody on another node
        window(rank(0), late("checkpoint")),  # a rule of its own
        window(waits_for_data(20.0), waits_for_data(30.0)),  # all do, and whoever longest is the late one
    ],
    ids=["alike", "alone", "not-waited-for", "little", "both-wait", "saving", "all-wait-for-data"],
)
def test_these_are_no_stragglers(seen: Window) -> None:
    assert list(straggler(seen)) == []


def test_workers_that_are_equally_idle_are_not_why_one_waits_for_its_batches() -> None:
    """Pinning, or the way of a batch: its supply is like the others'."""
    assert cause_of(waits(workers=fetching(20.0)), late("data_wait", workers=fetching(20.0))) == "input"


@pytest.mark.parametrize(("slower", "told"), [(1.1, 0), (1.5, 1)])
def test_ranks_whose_workers_are_equally_slow_take_turns_in_waiting(slower: float, told: int) -> None:
    """In lockstep one is a moment behind and waits for its batch; the other waits for it, and its workers catch up."""
    first = waits(workers=fetching(200.0))
    second = late("data_wait", workers=fetching(slower * 200.0))

    assert len(list(straggler(window(first, second)))) == told


# --- why ----------------------------------------------------------------------------------------------------------


def test_its_input() -> None:
    assert cause_of(waits(), late("data_wait")) == "input"


def test_its_copies() -> None:
    assert cause_of(waits(), late("h2d")) == "copies"


@pytest.mark.parametrize("phase", ["forward", "optimizer"])
def test_what_it_computes(phase: str) -> None:
    assert cause_of(waits(), late(phase)) == "compute"


def test_where_there_is_no_gpu_none_is_to_be_replaced() -> None:
    for gpu_memory, named in (({}, True), ({"gpu": None}, False)):
        (found,) = straggler(window(waits(**gpu_memory), late("forward", **gpu_memory)))
        assert ("GPU" in found.advice) == named


def test_garbage() -> None:
    assert cause_of(waits(), late("gc")) == "garbage collection"


@pytest.mark.parametrize("phase", ["data_wait", "h2d", "gc"])
def test_what_all_ranks_have_is_not_why_one_is_late(phase: str) -> None:
    """Both lose 40 ms to it; rank 1 computes longer, and that is what rank 0 waits for."""
    both = {phase: 40.0}
    first = rank(0, phases_ms={**both, "backward": HEALTHY_MS["backward"] + LATE_MS})
    second = rank(1, phases_ms={**both, "forward": HEALTHY_MS["forward"] + LATE_MS})

    assert cause_of(first, second) == "compute"


def test_a_gpu_that_is_throttled() -> None:
    assert cause_of(waits(), late("forward"), gpus=(gpu(0), gpu(1, throttle_s=HOT))) == "throttle"


def test_gpus_that_are_all_throttled_make_none_late() -> None:
    assert cause_of(waits(), late("forward"), gpus=(gpu(0, throttle_s=HOT), gpu(1, throttle_s=HOT))) == "compute"


def test_a_throttled_gpu_does_not_make_its_input_late() -> None:
    assert cause_of(waits(), late("data_wait"), gpus=(gpu(0), gpu(1, throttle_s=HOT))) == "input"


@pytest.mark.parametrize("phase", ["forward", "other"])
def test_cores_that_others_have(phase: str) -> None:
    assert cause_of(waits(), late(phase, trainer_runqueue_s=0.020 * STEPS)) == "CPU contention"


@pytest.mark.parametrize("waited_s", [None, 0.005 * STEPS])
def test_a_wait_for_cores_that_is_not_known_or_short_is_not_it(waited_s: float | None) -> None:
    assert cause_of(waits(), late("forward", trainer_runqueue_s=waited_s)) == "compute"


def test_cores_that_all_ranks_wait_for_make_none_late() -> None:
    crowded = {"trainer_runqueue_s": 0.020 * STEPS}

    assert cause_of(waits(**crowded), late("forward", **crowded)) == "compute"


def test_batches_that_the_rank_makes_itself_are_late_for_want_of_a_core() -> None:
    alone = {"loader": loader(workers=0, wait_ms=32.0), "workers": fetching(batches=0)}

    assert cause_of(waits(), late("data_wait", trainer_runqueue_s=0.020 * STEPS, **alone)) == "CPU contention"
    assert cause_of(waits(), late("data_wait", **alone)) == "input"


def test_batches_that_workers_make_are_late_for_want_of_cores_of_theirs() -> None:
    crowded = {"workers": fetching(160.0, cpu=0.4, runqueue=0.5)}
    elsewhere = {"trainer_runqueue_s": 0.020 * STEPS}  # not in the wait for a batch: there the rank sleeps

    assert cause_of(waits(), late("data_wait", **crowded)) == "CPU contention"
    assert cause_of(waits(), late("data_wait", **elsewhere)) == "input"


# --- backward, which is both --------------------------------------------------------------------------------------


def logged(*, comm_ms: float, overlap_ms: float) -> Pauses:
    return replace(NO_PAUSES, ddp_comm_ns=int(comm_ms * MS), ddp_overlap_ns=int(overlap_ms * MS))


def on_one_contended_core(
    *, backward_ms: float, device: Any = None, pauses: Pauses | None = None, queued: float = 1.0
) -> Window:
    """Rank 1 takes 30 ms longer for its forward and so much for its backward, that part of it without a core; rank 0
    waits in comm for both."""
    on_cpu = facts(device=device)
    waiting = rank(
        0,
        phases_ms={"comm": LATE_MS + backward_ms},
        facts=on_cpu,
        pauses=logged(comm_ms=LATE_MS + backward_ms + 10.0, overlap_ms=10.0),
    )
    slow = rank(
        1,
        phases_ms={"forward": HEALTHY_MS["forward"] + LATE_MS, "backward": HEALTHY_MS["backward"] + backward_ms},
        facts=on_cpu,
        pauses=logged(comm_ms=11.0, overlap_ms=10.0) if pauses is None else pauses,
        trainer_runqueue_s=queued * (LATE_MS + backward_ms) / 1e3 * STEPS,
    )
    return window(waiting, slow)


def test_a_slower_backward_counts_where_its_exposed_communication_is_known() -> None:
    (found,) = straggler(on_one_contended_core(backward_ms=50.0))

    assert found.seconds_per_step == pytest.approx(0.080)
    assert found.evidence["cause"] == "CPU contention"
    assert found.evidence["backward_excess_seconds_per_step"] == pytest.approx(0.050)
    assert found.evidence["exposed_comm_seconds_per_step"] == pytest.approx(0.001)
    assert found.evidence["usual_exposed_comm_seconds_per_step"] == pytest.approx(0.080)
    assert found.evidence["overlapped_comm_seconds_per_step"] == pytest.approx(0.010)


@pytest.mark.parametrize("backward_ms", [50.0, 130.0])
def test_what_a_rank_has_more_to_compute_is_shared_by_all(backward_ms: float) -> None:
    (found,) = straggler(on_one_contended_core(backward_ms=backward_ms, queued=0.1))

    assert found.evidence["cause"] == "compute"
    assert found.seconds_per_step == pytest.approx((0.030 + backward_ms / 1e3) / 2)


@pytest.mark.parametrize(
    "seen",
    [
        on_one_contended_core(backward_ms=10.0),  # the log is of one step in a hundred
        on_one_contended_core(backward_ms=50.0, pauses=NO_PAUSES),  # not DDP on all ranks
        on_one_contended_core(backward_ms=50.0, device={"uuid": "GPU-1"}),  # the log is of the GPU, phases are not
    ],
    ids=["little", "not-known", "on-a-gpu"],
)
def test_else_the_rest_of_the_step_is_what_counts(seen: Window) -> None:
    (found,) = straggler(seen)

    assert found.seconds_per_step == pytest.approx(LATE_MS / 1e3)
    assert "backward_excess_seconds_per_step" not in found.evidence


@pytest.mark.parametrize(("longer", "late_ms"), [(1.3, 0.5 * 0.3 * 84.0), (1.02, None)])
def test_a_slower_backward_makes_a_rank_late_as_far_as_its_forward_is_slower_too(
    longer: float, late_ms: float | None
) -> None:
    """Its forward alone is not: 30 % of 30 ms in a step of 100 ms."""
    on_cpu = facts(device=None)
    first = rank(0, phases_ms={"comm": 0.3 * 84.0}, facts=on_cpu, pauses=logged(comm_ms=30.0, overlap_ms=10.0))
    own_ms = {"forward": longer * HEALTHY_MS["forward"], "backward": 1.3 * HEALTHY_MS["backward"]}
    second = rank(1, phases_ms=own_ms, facts=on_cpu, pauses=logged(comm_ms=11.0, overlap_ms=10.0))

    found = list(straggler(window(first, second)))

    assert [each.seconds_per_step for each in found] == pytest.approx([] if late_ms is None else [late_ms / 1e3])


# --- the GPU's own clock ------------------------------------------------------------------------------------------


def timed(*, forward_ms: float = 30.0, backward_ms: float = 54.0, steps: int = 6) -> GpuTime:
    return record(
        GpuTime,
        steps=steps,
        forward_ns_total=int(forward_ms * MS * steps),
        backward_ns_total=int(backward_ms * MS * steps),
        optimizer_ns_total=8 * MS * steps,
    )


def on_gpus(first: GpuTime | None, second: GpuTime | None, **changes: Any) -> Window:
    """Two ranks whose programs wait for their GPUs at the end of the step: by their own clocks they are alike."""
    waiting = {"forward": 2.0, "backward": 2.0, "sync": 90.0}
    other_gpu = facts(device={"uuid": "GPU-1", "capability": [9, 0]})
    return window(
        rank(0, phases_ms=waiting, gpu_time=first),
        rank(1, phases_ms=waiting, gpu_time=second, facts=other_gpu),
        **changes,
    )


SLOW, WAITING = timed(forward_ms=60.0), timed(backward_ms=84.0)


def test_a_gpu_that_computes_longer_is_seen_on_its_own_clock() -> None:
    (found,) = straggler(on_gpus(WAITING, SLOW))

    assert (found.rank, found.evidence["cause"]) == (1, "compute")
    assert found.seconds_per_step == pytest.approx(0.030)
    assert found.evidence["gpu_forward_excess_seconds_per_step"] == pytest.approx(0.030)


def test_a_gpu_that_is_slow_because_it_is_throttled() -> None:
    (found,) = straggler(on_gpus(WAITING, SLOW, gpus=(gpu(0), gpu(1, throttle_s=HOT))))

    assert found.evidence["cause"] == "throttle"


@pytest.mark.parametrize(
    "seen",
    [
        on_gpus(timed(), timed()),
        on_gpus(None, SLOW),  # nothing to compare with
        on_gpus(timed(), SLOW),  # the other does not wait for it
        on_gpus(timed(backward_ms=84.0, steps=1), timed(forward_ms=60.0, steps=1)),  # one step says nothing
    ],
    ids=["alike", "not-timed", "not-waited-for", "one-step"],
)
def test_these_gpus_hold_nobody_up(seen: Window) -> None:
    assert list(straggler(seen)) == []


def test_the_steps_that_a_gpu_was_timed_in_are_those_of_the_window() -> None:
    def look(node: Node, gpu_time: GpuTime | None) -> Snapshot:
        snapshot = node.train()
        (training,) = snapshot.state.training
        return replace(snapshot, state=replace(snapshot.state, training=(replace(training, gpu_time=gpu_time),)))

    node = Node()
    first, then, none = look(node, timed(steps=10)), look(node, timed(steps=16)), look(node, None)

    assert between(first, then).ranks[0].gpu_time == timed(steps=6)
    assert between(first, none).ranks[0].gpu_time is None


def test_what_the_programs_clock_has_told_is_not_told_again() -> None:
    (found,) = straggler(window(waits(gpu_time=WAITING), late("data_wait", gpu_time=SLOW)))

    assert found.evidence["cause"] == "input"


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
