"""Where a data type is told, and where it is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from healthy_node import facts, gpu, rank, rules, window
from rule_cases import CASES


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus": (gpu(ratios={"sm_active": 0.8, "tensor_active": 0.5, "fp32_active": 0.6}),)},
        {"gpus": (gpu(ratios={"sm_active": 0.3, "tensor_active": 0.0, "fp32_active": 0.6}),)},
        {"gpus": (gpu(ratios={}),)},
        {"gpus": ()},
    ],
)
def test_32_bits_are_no_finding_without_the_pipes_figures_or_against_them(changes) -> None:
    assert rules(replace(CASES["fp32-on-tensor-cores"].fault, **changes)) == []


def test_a_card_without_tensor_cores_cannot_use_them() -> None:
    old = {"type": "cuda", "uuid": "GPU-0", "capability": [6, 1]}
    case = CASES["fp32-on-tensor-cores"].fault
    precision = case.ranks[0].facts["precision"]

    assert rules(replace(case, ranks=(rank(facts=facts(device=old, precision=precision)),))) == []


def test_double_precision_that_is_asked_for_is_left_alone() -> None:
    meant = {"parameters": "float64", "default": "float32", "optimizer": "LBFGS", "autocast": False}

    assert rules(window(rank(facts=facts(precision=meant)))) == []
    assert rules(window(rank(facts=facts(precision={**meant, "optimizer": "Adam"})))) == ["float64-parameters"]
    assert rules(window(rank(facts=facts(precision={**meant, "optimizer": "Adam", "autocast": "bfloat16"})))) == []
    solves = facts(precision={**meant, "optimizer": "Adam"}, graph={"nodes": 90, "decomposes": True})
    assert rules(window(rank(facts=solves))) == []
