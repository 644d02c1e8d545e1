"""How much of what crossed a GPU's link the ranks' copies explain: by card, and by direction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpulaunch.exporters.prometheus.families import Families
from gpulaunch.exporters.prometheus.values import Facts, families
from gpulaunch.profiler.record import CopyTotals, GpuState, NodeState, TrainingState

MIB = 1 << 20


def ratios(made: Families) -> dict[tuple[str, str], float]:
    """By the card's number and the direction."""
    return {
        (sample.labels["gpu"], sample.labels["direction"]): sample.value
        for family in made.collect()
        for sample in family.samples
        if sample.name == "gpulaunch_copy_coverage_ratio"
    }


def copied(node: NodeState, rank: int, uuid: str | None, **mib: int) -> TrainingState:
    """A rank on this GPU that has copied so much, by direction; half of it from pinned memory."""
    copies = {
        (direction, memory): CopyTotals(count=9, size_bytes=size * MIB // 2, blocked_ns=0, gpu_ns=0)
        for direction, size in mib.items()
        for memory in ("pageable", "pinned")
    }
    facts: dict[str, Any] = {} if uuid is None else {"device": {"type": "cuda", "index": 0, "uuid": uuid}}
    return replace(node.training[0], rank=rank, copies=copies, facts=facts)


@pytest.fixture
def cards(node: NodeState) -> NodeState:
    """Two cards, over each of which 100 MiB went one way and 40 MiB the other; one has two MIG instances."""
    crossed = {"receive": 100 * MIB, "transmit": 40 * MIB}
    whole = (GpuState(index=at, uuid=f"GPU-{at}", parent_uuid=None, model="", pcie_bytes=crossed) for at in (0, 1))
    instances = (
        GpuState(index=1, uuid=f"MIG-{at}", parent_uuid="GPU-1", model="", instance=(place, 0))
        for place, at in enumerate("ab")
    )
    return replace(node, devices=(*whole, *instances))


def told(cards: NodeState, *training: TrainingState) -> dict[tuple[str, str], float]:
    return ratios(families(replace(cards, training=training), Facts(version="1.2.3")))


def test_two_ranks_on_one_card_are_held_against_its_link_together(cards: NodeState) -> None:
    found = told(cards, copied(cards, 0, "GPU-0", h2d=50, d2h=10), copied(cards, 1, "GPU-0", h2d=40, d2h=20))

    assert found == {("0", "h2d"): 0.9, ("0", "d2h"): 0.75}


def test_each_card_has_its_own(cards: NodeState) -> None:
    found = told(cards, copied(cards, 0, "GPU-1", h2d=50), copied(cards, 1, "GPU-0", h2d=40, d2h=20))

    assert found == {("1", "h2d"): 0.5, ("0", "h2d"): 0.4, ("0", "d2h"): 0.5}


def test_ranks_on_mig_instances_share_the_link_of_their_card(cards: NodeState) -> None:
    """CUDA leaves out what kind of a UUID it is, and the rank takes it for a card's."""
    found = told(cards, copied(cards, 0, "GPU-a", h2d=50), copied(cards, 1, "MIG-b", h2d=40))

    assert found == {("1", "h2d"): 0.9}


def test_without_a_gpu_that_is_known_there_is_no_ratio(cards: NodeState) -> None:
    assert told(cards, copied(cards, 0, None, h2d=50), copied(cards, 1, "GPU-9", h2d=40)) == {}


def test_a_link_that_is_not_counted_has_no_ratio(cards: NodeState) -> None:
    silent = replace(cards, devices=tuple(replace(device, pcie_bytes={"receive": 0}) for device in cards.devices))

    assert told(silent, copied(cards, 0, "GPU-0", h2d=50, d2h=10)) == {}
