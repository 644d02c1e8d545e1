"""Which communication is told as needless, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from healthy_node import HEALTHY_MS, MS, NO_PAUSES, STEPS, facts, host, rank, rules, site, window
from rule_cases import CASES, reducing_again, sharded_rank

from gpulaunch.profiler.analysis.advisor import advise
from gpulaunch.profiler.analysis.finding import place_of
from gpulaunch.profiler.analysis.window import RankWindow


def test_small_collectives_cost_what_those_after_the_first_one_of_a_step_take() -> None:
    """Ranks whose batches differ wait for each other in the first one, all of them: that wait would only move."""
    calls = {"count": 4 * STEPS, "blocked_ns": 13 * STEPS * MS, "gpu_ns": STEPS * MS // 2}
    ranks = [rank(number, phases_ms={"comm": 13.0}, sites=(site("small_collective", **calls),)) for number in range(4)]

    assert rules(window(*ranks)) == []


def test_collectives_that_need_each_other_are_not_to_be_combined() -> None:
    fault = CASES["small-collectives"].fault
    place = str(place_of(fault.ranks[0].sites[0].text))

    def with_chained(*lines: str) -> list[str]:
        return rules(replace(fault, ranks=tuple(replace(each, chained=frozenset(lines)) for each in fault.ranks)))

    assert with_chained(place) == []
    assert with_chained(f"{place}0") == ["small-collectives"]


def test_collectives_of_a_few_numbers_now_and_then_are_a_log() -> None:
    now_and_then = site("small_collective", count=STEPS, blocked_ns=20 * STEPS * MS)

    assert rules(window(rank(phases_ms={"comm": 20.0}, sites=(now_and_then,)))) == []


def test_redundant_reductions_one_after_another_are_not_to_be_combined() -> None:
    again = reducing_again(0)
    calls = {"count": 20 * STEPS, "blocked_ns": 9 * STEPS * MS, "gpu_ns": 8 * STEPS * MS}
    sites = tuple(site(kind, again.sites[0].text, **calls) for kind in ("collective", "small_collective"))
    ranks = (replace(again, sites=sites), replace(again, rank=1, sites=(*sites, *sites)))

    (found,) = advise(window(*ranks))

    assert (found.rule, found.ranks) == ("redundant-all-reduce", (0, 1))
    assert found.seconds_per_step == pytest.approx(0.018), "the other rank waits for this one, too"
    assert rules(window(again)) == [], "the others may have nothing, and get what it has"
    ranks = (ranks[0], replace(ranks[1], facts=facts(reduced={"same": False})))
    assert rules(window(*ranks)) == ["small-collectives"], "as ever, where not all of them have the same"


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


def test_passes_that_need_each_other_or_no_other_rank_are_no_accumulation() -> None:
    ddp = {"modules": 1, "reductions_per_step": 4}
    reduces = {"gpu": None, "phases_ms": {"comm": 40.0}, "microsteps": 4 * STEPS}

    assert rules(window(rank(facts=facts(ddp=ddp), **reduces))) == ["reduced-in-accumulation"]
    assert rules(window(rank(facts=facts(ddp=ddp, precision={"optimizer": "LBFGS"}), **reduces))) == []
    apart, added = (facts(ddp=ddp, graph={"nodes": 90, "accumulates": adds}) for adds in (False, True))
    assert rules(window(rank(facts=apart, **reduces))) == []
    assert rules(window(rank(facts=added, **reduces))) == ["reduced-in-accumulation"]
    assert rules(window(rank(facts=added, **reduces, backward={"train.py:7": 9, "train.py:9": 8}))) == []
    assert rules(window(rank(facts=facts(ddp={**ddp, "world_size": 1}), **reduces))) == []
    small = CASES["small-collectives"].fault
    closures = [replace(each, facts=facts(precision={"optimizer": "LBFGS"})) for each in small.ranks]
    assert rules(replace(small, ranks=tuple(closures))) == []


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


@pytest.mark.parametrize(
    ("gathers", "size_kib", "parameters", "is_told"),
    [(13, 32, 3.0, True), (7, 32, 3.0, False), (13, 130, 3.0, False), (13, 32, 9.0, False), (13, 0, 0.0, False)],
    ids=["single layers", "few units", "large layers", "small blocks", "an older rank, which does not say"],
)
def test_units_of_fsdp_are_too_small_if_there_are_many(
    gathers: float, size_kib: float, parameters: float, *, is_told: bool
) -> None:
    found = advise(window(sharded_rank(gathers=gathers, size_kib=size_kib, parameters=parameters)))

    assert [each.rule for each in found] == ["fsdp-small-units"] * is_told


def test_a_search_for_unused_parameters_of_one_rank_asks_no_other() -> None:
    """The Trainer of transformers searches on one rank, too: 56 parameters, in steps of 10 ms."""
    told = {"modules": 1, "num_parameter_tensors": 56, "site": "train.py:88", "searched_in_vain": True}
    short = {"gpu": None, "phases_ms": {phase: each / 10 for phase, each in HEALTHY_MS.items()}}
    found = [rules(window(rank(**short, facts=facts(ddp={**told, "world_size": world_size})))) for world_size in (1, 2)]

    assert ["unused-parameters-searched" in each for each in found] == [False, True]


def test_a_search_takes_as_much_longer_as_the_host_is_slow() -> None:
    told = {"modules": 1, "num_parameter_tensors": 2000, "site": "train.py:88", "searched_in_vain": True}
    searching = rank(gpu=None, facts=facts(ddp=told))
    (usual,), (slow,) = (advise(window(searching, host=host(loop_ns=loop_ns))) for loop_ns in (20.0, 50.0))

    assert slow.seconds_per_step == pytest.approx(2.5 * usual.seconds_per_step)
