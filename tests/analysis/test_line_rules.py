"""Which lines and loops of a program are told, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from healthy_node import STEPS, facts, gpu, gpu_memory, host, rank, rules, window
from rule_cases import looping_rank

from gpulaunch.profiler.analysis.advisor import advise
from gpulaunch.profiler.analysis.line_advice import advice_on
from gpulaunch.profiler.record.line_calls import RECOMPUTED


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


@pytest.mark.parametrize(("logging", "told"), [(6, 31), (9, 34), (12, 25)])
def test_a_line_that_logs_what_it_computes_costs_both(logging: int, told: int) -> None:
    """If the first is no loss by itself; and what logs is not told for the few samples in which it computes."""
    lines, calls = {"a.py:7": 25, "a.py:9": 4}, {"a.py:7": "torchmetrics.BinaryAUROC.compute", "a.py:9": "json.dumps"}
    logged = {"a.py:7": logging, "a.py:9": 9}
    found = advise(window(rank(samples=100, calling=lines, calls=calls, logged=logged, gpu=None)))

    assert [each.evidence["samples_in_line"] for each in found if each.rule == "hot-line"] == [told]


def test_a_line_that_works_on_tensors_is_not_one_with_the_call_below_it() -> None:
    lines, calls = {"train.py:10": 30, "train.py:11": 35}, {"train.py:10": "update", "train.py:11": "json.dump"}
    (on_gpu,) = advise(window(rank(samples=100, calling=lines, calls=calls)))
    on_cpu = advise(window(rank(samples=100, calling=lines, calls=calls, gpu=None)))

    assert (on_gpu.line, on_gpu.evidence["samples_in_line"]) == (11, 35)
    assert {(each.line, each.evidence["samples_in_line"]) for each in on_cpu} == {(10, 30), (11, 35)}


AVERAGED = {"train.py:90": 45, "ema.py:9": 14, "ema.py:12": 12, "log.py:3": 60}
COPYING = {"train.py:90": "update", "ema.py:9": "copy.deepcopy", "ema.py:12": "x.load_state_dict", "log.py:3": "json.x"}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, {("ema.py", 9, 71), ("log.py", 3, 60)}),
        ({"calling": {**AVERAGED, "ema.py:12": 18}}, {("ema.py", 9, 77), ("log.py", 3, 60)}),
        ({"after_step": {}}, {("train.py", 90, 45), ("log.py", 3, 60)}),
        ({"after_step": dict.fromkeys(AVERAGED, "all")}, {("train.py", 90, 45), ("log.py", 3, 60)}),
        ({"calling": {**AVERAGED, "train.py:90": 0}}, {("log.py", 3, 60)}),
        ({"gpu": gpu_memory()}, {("log.py", 3, 60)}),
    ],
    ids=[
        "",
        "another copy has more so far",
        "not known to belong together",
        "mostly something else",
        "too little",
        "may wait for the GPU",
    ],
)
def test_all_of_a_function_after_a_step_that_averages_copies_of_the_weights_is_one_loss(
    changes: dict[str, Any], found: set[tuple[str, int, int]]
) -> None:
    part = dict.fromkeys(("train.py:90", "ema.py:9", "ema.py:12"), "train.py:90")
    averages = rank(
        **{"samples": 300, "gpu": None, "calling": AVERAGED, "calls": COPYING, "after_step": part, **changes}
    )

    told = advise(window(averages))

    assert {(each.file, each.line, each.evidence["samples_in_line"]) for each in told} == found


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
    few = replace(ranks[1], calling={"train.py:88": 14})  # 7 % +- 1.8 %
    assert rules(window(ranks[0], few)) == []
    made = [replace(each, facts={**each.facts, "ddp": {"site": "model.py:7 wrap"}}) for each in ranks]
    (found,) = advise(window(*made))
    assert (found.file, found.line) == ("model.py", 7)


@pytest.mark.parametrize(
    ("call", "with_backward", "saved"),
    [
        ("differences of pairs", True, 1.0),
        ("largest singular value", True, 1.0),
        ("permutation", False, 1.0),
        ("LSTM cell", True, 0.6),
        ("attention in steps", True, 0.4),
        ("same passes", True, 0.5),
        ("adapter added to weights", True, 1.4),
        ("the same in every turn", True, 1.0),
        ("the same in every turn, forward", False, 1.0),
        ("product with zeros", True, 1.0),
        ("Adam by hand", False, 0.6),
    ],
)
def test_a_call_that_backward_goes_through_costs_its_part_of_that_too(
    call: str, *, with_backward: bool, saved: float
) -> None:
    """15 % of the step is half of forward, so half of backward goes with it."""
    seen = rank(phases_ms={"forward": 30.0, "backward": 40.0}, samples=100, calls={"train.py:88": call}, gpu=None)
    seen = replace(seen, calling={"train.py:88": round(100 * 0.015 / seen.step_s)})

    (found,) = advise(window(seen))

    line_s = seen.calling["train.py:88"] / 100 * seen.step_s
    both_s = line_s + (line_s / 0.030 * 0.040 if with_backward else 0.0)
    assert found.seconds_per_step == pytest.approx(saved * both_s)
    assert found.evidence["call"] == call


@pytest.mark.parametrize(
    ("scores_mib", "threads", "saved"),
    [(None, 2, 0.4), (0, 2, 0.4), (2, 2, 0.0), (2, 1, 0.2), (3, 1, 0.4), (3, 2, 0.4), (31, 2, 0.4), (32, 2, 0.75)],
)
def test_what_attention_at_once_saves_depends_on_the_size_of_its_scores(
    scores_mib: int | None, threads: int, saved: float
) -> None:
    """30 ms of forward, and so all of backward's 40."""
    graph = {} if scores_mib is None else {"graph": {"scores_bytes": scores_mib << 20}}
    calls = {"train.py:88": "attention in steps"}
    seen = rank(phases_ms={"forward": 30.0, "backward": 40.0}, samples=700, calls=calls, gpu=None)
    seen = replace(seen, calling={"train.py:88": 300}, facts={"torch_threads": threads, **graph})

    assert [each.seconds_per_step for each in advise(window(seen))] == [
        pytest.approx(saved * (300 / 700 * seen.step_s + 0.040)) for _ in range(saved > 0)
    ]


@pytest.mark.parametrize(("call", "with_backward"), [("for all ranks", False), ("pairs of all ranks", True)])
@pytest.mark.parametrize("ranks", [2, 8])
def test_what_a_rank_computes_for_the_others_is_their_share(call: str, ranks: int, *, with_backward: bool) -> None:
    facts = {"ddp": {"world_size": ranks}}
    seen = rank(phases_ms={"forward": 30.0, "backward": 40.0}, samples=100, calls={"train.py:88": call}, gpu=None)
    seen = replace(seen, calling={"train.py:88": 40}, facts=facts)

    (found,) = advise(window(seen))

    line_s = 0.4 * seen.step_s
    both_s = line_s + (line_s / max(0.030, line_s) * 0.040 if with_backward else 0.0)
    assert found.seconds_per_step == pytest.approx((1 - 1 / ranks) * both_s)


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
    (slow,) = advise(window(seen, host=host(loop_ns=40.0)))

    assert found.seconds_per_step == pytest.approx(0.3 * seen.step_s + checks_ms / 1e3)
    assert slow.seconds_per_step == pytest.approx(0.3 * seen.step_s + min(2 * checks_ms, 0.8 * 40.0) / 1e3)


@pytest.mark.parametrize(("logging", "is_told"), [(19, False), (28, False), (36, False), (38, True)])
def test_a_tenth_of_the_step_is_a_loss_by_logging(logging: int, *, is_told: bool) -> None:
    """One `self.log` in a small Lightning step takes 5 to 7 %, give or take a quarter of that."""
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


@pytest.mark.parametrize(("loop_ns", "told"), [(None, 0), (20.0, 0), (32.0, 0), (34.0, 1), (900.0, 1)])
def test_so_they_are_on_a_slow_host(loop_ns: float | None, told: int) -> None:
    """Those of 50 us, by how long a turn of a loop of Python's takes."""
    assert len(rules(window(looping_rank(nodes=400), host=host(loop_ns=loop_ns)))) == told


@pytest.mark.parametrize(("loop_ns", "share"), [(None, 15 / 20), (20.0, 15 / 20), (24.0, 18 / 20), (60.0, 1.0)])
def test_of_longer_nodes_only_torchs_own_part_is_lost(loop_ns: float | None, share: float) -> None:
    (found,) = advise(window(looping_rank(nodes=1000), host=host(loop_ns=loop_ns)))

    assert found.seconds_per_step == pytest.approx(share * 0.040, rel=0.01)


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


@pytest.mark.parametrize(("call", "told"), [("Python code", ["hot-line"]), ("accuracy", [])])
def test_on_a_gpu_a_line_is_told_that_computes_with_no_tensor(call: str, told: list[str]) -> None:
    """Another one may wait for the GPU."""
    line = {"samples": 20, "calling": {"train.py:88": 15}, "calls": {"train.py:88": call}}

    assert rules(window(rank(**line))) == told


@pytest.mark.parametrize(
    ("changes", "free_gib", "told"),
    [
        ({}, 21, ["hot-line"]),
        ({}, 19, []),
        ({"facts": facts(torch_threads=2)}, 21, []),
        ({"facts": facts(torch_threads=None)}, 400, []),
        ({"gpu": gpu_memory()}, 400, []),
        ({"samples": 194, "calling": {"train.py:90": 26}}, 400, []),
        ({"samples": 244, "calling": {"train.py:90": 42}}, 400, ["hot-line"]),
    ],
    ids=[
        *("", "two ranks may fill 20 GiB", "with more threads more", "not known", "the memory is a GPU's"),
        *("what is cheap", "more than that"),
    ],
)
def test_activations_are_computed_again_in_vain_where_memory_is_plentiful(
    changes: dict[str, Any], free_gib: int, told: list[str]
) -> None:
    line = {"calling": {"train.py:90": 50}, "calls": {"train.py:90": RECOMPUTED}, "samples": 100}
    again = rank(**{"gpu": None, "facts": facts(torch_threads=1), **line, **changes})
    room = host(memory_available_bytes=int(free_gib * 2**30 * again.step_s))

    assert rules(window(again, rank(1, gpu=None, facts=facts(torch_threads=1)), host=room)) == told


@pytest.mark.parametrize(
    ("call", "cure"),
    [
        *((call, "Validate every N epochs") for call in ("validate", "Trainer._evaluate", "evaluate_model")),
        ("evaluate.metric.compute", "compute the metric every N steps"),
        *((call, "Run it every N steps") for call in ("jsonschema.validate", "validate_batch", "eval_reward", "eval")),
    ],
)
def test_the_cure_is_that_of_what_is_called(call: str, cure: str) -> None:
    assert cure in advice_on(call)
