"""Which ranks fetch the batches of others: one whose batches are its own is not told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from healthy_node import STEPS, facts, loader, rank, site
from rule_cases import CASES

from gpulaunch.profiler.analysis.dispatch_rules import dispatch_of
from gpulaunch.profiler.analysis.window import RankWindow, Window

FAULT = CASES["dataloader-one-rank"].fault
FIRST, SECOND = FAULT.ranks


def with_ranks(first: RankWindow = FIRST, second: RankWindow = SECOND) -> Window:
    return replace(FAULT, ranks=(first, second))


def test_a_rank_that_fetches_for_another_pays_for_the_others_part_and_for_sending() -> None:
    cost = dispatch_of(FAULT, FIRST)

    assert cost is not None
    assert (cost.wait_s, cost.send_s) == pytest.approx((0.040, 0.005))
    assert cost.lost_s == pytest.approx(0.5 * 0.040 + 0.005)
    assert dispatch_of(FAULT, SECOND) is None


@pytest.mark.parametrize(
    "window",
    [
        pytest.param(with_ranks(second=replace(SECOND, loader=loader())), id="the other fetches, too"),
        pytest.param(with_ranks(second=replace(SECOND, sites=())), id="the other calls no collective"),
        pytest.param(
            with_ranks(second=replace(SECOND, sites=(site("collective", "other.py:7 f"),))), id="at another line"
        ),
        pytest.param(
            with_ranks(second=replace(SECOND, sites=(site("collective", count=STEPS // 10),))), id="not in every step"
        ),
        pytest.param(with_ranks(first=replace(FIRST, facts=facts())), id="ranks that share a layer"),
        pytest.param(
            with_ranks(first=replace(FIRST, facts=facts(ddp={"modules": 1, "world_size": 1}))), id="within a node"
        ),
        pytest.param(
            with_ranks(first=replace(FIRST, facts=facts(fsdp={"reductions_per_step": 1.0}))),
            id="FSDP, whose own collectives are at lines of the program",
        ),
        pytest.param(with_ranks(second=replace(SECOND, steps=0)), id="the other does not train"),
        pytest.param(replace(FAULT, ranks=(FIRST,)), id="alone"),
        pytest.param(
            with_ranks(first=rank(loader=loader(), facts=FIRST.facts, sites=(site("collective"),))), id="costs little"
        ),
    ],
)
def test_ranks_whose_batches_are_their_own_are_not_told(window: Window) -> None:
    assert [dispatch_of(window, each) for each in window.ranks] == [None] * len(window.ranks)
