"""Gradients and scores that nothing uses: what decides whether they are told, and at what cost."""

from __future__ import annotations

from typing import Any

import pytest
from healthy_node import HEALTHY_MS, facts, rank, window
from rule_cases import gradients, head

from gpulaunch.profiler.analysis.compute_rules import gradients_unused, targets_ignored

MODEL_S = (HEALTHY_MS["forward"] + HEALTHY_MS["backward"]) / 1e3
HALF_IGNORED = {"rows": 1000, "ignored": 0.5}


def told(read: Any, targets: Any, *, line: str = "train.py:88", **of_rank: Any) -> float:
    """Seconds per step; 0: nothing is told."""
    of_rank["facts"] = facts(device=None, gradients=read, targets=targets)
    node = window(rank(gpu=None, scores_line=line, **of_rank))
    return sum(loss.seconds_per_step for loss in targets_ignored(node))


@pytest.mark.parametrize(
    ("read", "targets", "unused"),
    [
        (head(rows=1000), HALF_IGNORED, 0.5),
        (head(rows=1000, of_loss=990), HALF_IGNORED, 1 - 0.5 * 0.99),
        (head(rows=1000, of_loss=150), HALF_IGNORED, 0.85),
        (head(rows=1000, of_loss=150), None, 0.85),
    ],
    ids=["ignored", "all but the last ones of causal sequences", "left out after the head", "no targets are known"],
)
def test_the_rows_that_are_not_used_cost_their_part_of_the_head(read: Any, targets: Any, unused: float) -> None:
    assert told(read, targets) == pytest.approx(0.5 * unused * MODEL_S)


@pytest.mark.parametrize(
    ("read", "targets"),
    [
        (head(rows=500), HALF_IGNORED),
        (head(rows=1000), {"rows": 1000, "ignored": 0.1}),
        (head(rows=1000), {"rows": 4000, "ignored": 0.9}),
        (head(rows=1000), None),
        (None, HALF_IGNORED),
        (head(rows=0), HALF_IGNORED),
        (head(rows=1000) | {"loss_ignores": False}, HALF_IGNORED),
    ],
    ids=[
        "chosen before the head",
        "few",
        "of another loss",
        "none are known",
        "no graph was read",
        "no cross-entropy",
        "it ignores another number",
    ],
)
def test_otherwise_nothing_is_told(read: Any, targets: Any) -> None:
    assert told(read, targets) == 0


@pytest.mark.parametrize(("sampled_ms", "head_ms"), [(5.0, 15.0), (15.0, 22.5)])
def test_the_head_costs_no_more_than_its_samples_show_nor_than_its_products(sampled_ms: float, head_ms: float) -> None:
    """5 of 15 ms of forward are as much of backward; where the line calls a whole model, half of that is its head."""
    ms = HEALTHY_MS | {"forward": 15.0, "backward": 30.0}
    share = sampled_ms / sum(ms.values())
    cost_s = told(head(rows=1000), {"rows": 1000, "ignored": 0.9}, scores_share=share, phases_ms=ms)
    assert cost_s == pytest.approx(0.9 * head_ms / 1e3, rel=0.01)


def test_a_loss_that_a_library_computes_cannot_be_changed() -> None:
    assert told(head(rows=1000), HALF_IGNORED, line="") == 0


@pytest.mark.parametrize("resting", [0, 400_000])
def test_what_an_optimizer_has_in_vain_costs_its_part_of_it_too(resting: int) -> None:
    """It has 400,000 that it updates, and as many of the 600,000 that nothing updates, with a learning rate of 0."""
    read = gradients(unused=600_000, share=0.5) | {"resting_elements": resting}

    (loss,) = gradients_unused(window(rank(gpu=None, facts=facts(device=None, gradients=read))))

    of_optimizer = 0.5 * HEALTHY_MS["optimizer"] if resting else 0.0
    assert loss.seconds_per_step == pytest.approx((0.5 * HEALTHY_MS["backward"] + of_optimizer) / 1e3)
