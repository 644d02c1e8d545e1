"""Cards that should not be used again: what counts as a fault, and where the ranks go."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.gpus.health import HEALTH_FILE, Health, Placement, assign_cards, fault, parse, read, sentence
from gpulaunch.launcher.job.host_info import Gpu


def card(index: int, uuid: str = "") -> Gpu:
    return Gpu(index=index, uuid=uuid or f"GPU-{index}", name="H200", memory_bytes=1, pci_bus_id="0000:3b:00.0")


def health(index: int, *xids: int, ecc: int = 0, action: str = "none") -> Health:
    return Health(index=index, uuid=f"GPU-{index}", xids=xids, ecc_uncorrected=ecc, recovery_action=action)


# -- the sidecar's file


def test_the_sidecars_file_is_read(tmp_path: Path) -> None:
    gpu = {"index": 0, "uuid": "GPU-0", "xids": [79], "ecc_uncorrected": 0, "recovery_action": "none"}
    (tmp_path / HEALTH_FILE).write_text(json.dumps({"version": 1, "time_s": 1.5, "gpus": [gpu]}))

    assert read(str(tmp_path)) == (health(0, 79),)


def test_without_a_file_every_card_is_well(tmp_path: Path) -> None:
    assert read(str(tmp_path)) == ()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"version": 2, "gpus": [{"index": 0, "uuid": "GPU-0"}]}', '{"version": 1, "gpus": 3}'],
)
def test_of_nonsense_nothing_is_believed(text: str) -> None:
    assert parse(text) == ()


def test_a_broken_entry_does_not_hide_the_others() -> None:
    gpus = [{"index": "x"}, 7, {"index": 1, "uuid": "GPU-1", "xids": [48], "ecc_uncorrected": None}]

    assert parse(json.dumps({"version": 1, "gpus": gpus})) == (health(1, 48),)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["index", "uuid", "xids", "x"]), inner),
    max_leaves=10,
)


@given(json_values)
def test_no_file_can_make_the_reader_raise(gpus: object) -> None:
    parse(json.dumps({"version": 1, "gpus": gpus}))
    parse(json.dumps({"version": 1, "gpus": [gpus]}))


# -- what is a fault


@pytest.mark.parametrize(
    ("card_health", "said"),
    [
        (health(3, 79), "GPU 3 (GPU-3) reported Xid 79 (the GPU has fallen off the bus)"),
        (health(3, 79, 79, 13), "GPU 3 (GPU-3) reported Xid 79 (the GPU has fallen off the bus)"),
        (health(3, 155), "GPU 3 (GPU-3) reported Xid 155"),
        (health(3, ecc=1), "GPU 3 (GPU-3) reported 1 uncorrected ECC error"),
        (
            health(3, 48, ecc=2, action="gpu_reset"),
            "GPU 3 (GPU-3) reported Xid 48 (double-bit ECC error), 2 uncorrected ECC errors, that it needs gpu reset",
        ),
        (health(3), ""),
        (health(3, action="unknown"), ""),
        # What a program's own illegal access leaves behind: the card is as good as before.
        (health(3, 13, 31, 43, 45), ""),
    ],
)
def test_a_fault_is_the_cards_and_not_the_programs(card_health: Health, said: str) -> None:
    assert fault(card_health) == said


# -- where the ranks go


def where(placement: Placement) -> list[tuple[int, int | None]]:
    return [(move.local_rank, move.to.index if move.to else None) for move in placement.moves]


FOUR = [card(index) for index in range(4)]


@pytest.mark.parametrize(
    ("num_ranks", "faults", "busy", "moves", "visible"),
    [
        (2, [], [], [], ""),
        (2, [health(3, 79)], [], [], ""),  # nobody's card
        (2, [health(1, 79)], [], [(1, 2)], "0 2 3"),
        (2, [health(0, 79), health(1, 48)], [], [(0, 2), (1, 3)], "2 3"),
        (2, [health(1, 79), health(2, 79)], [], [(1, 3)], "0 3"),
        (2, [health(1, 79)], ["GPU-2"], [(1, 3)], "0 3 2"),
        (2, [health(1, 79)], ["GPU-2", "GPU-3"], [(1, None)], ""),
        (3, [health(0, 79), health(1, 79)], [], [(0, 3), (1, None)], "3 1 2"),
        (4, [health(1, 79)], [], [(1, None)], ""),
        (8, [health(1, 79)], [], [(1, None)], ""),  # more ranks than cards: the script decides who shares
    ],
)
def test_a_rank_goes_to_a_free_card_that_is_well(
    num_ranks: int, faults: Sequence[Health], busy: Sequence[str], moves: list[tuple[int, int | None]], visible: str
) -> None:
    placement = assign_cards(FOUR, num_ranks, faults, busy=busy)

    assert where(placement) == moves
    assert placement.visible == tuple(f"GPU-{index}" for index in visible.split())


@given(st.integers(0, 8), st.integers(1, 8), st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)))
def test_no_rank_of_a_good_card_moves_and_none_to_a_bad_busy_or_shared_one(
    num_cards: int, num_ranks: int, bad: set[int], taken: set[int]
) -> None:
    placement = assign_cards(
        [card(index) for index in range(num_cards)],
        num_ranks,
        [health(index, 79) for index in bad],
        busy={f"GPU-{index}" for index in taken},
    )
    targets = [move.to.index for move in placement.moves if move.to]
    free = set(range(num_ranks, num_cards)) - bad - taken

    assert {move.card.index for move in placement.moves} == bad & set(range(min(num_ranks, num_cards)))
    assert len(targets) == len(set(targets)) == min(len(free), len(placement.moves))
    assert set(targets) <= free
    assert len(placement.visible) == len(set(placement.visible))


def test_a_mig_instance_shares_its_cards_fault() -> None:
    instances = [card(0, "MIG-a"), card(0, "MIG-b"), card(1, "MIG-c"), card(1, "MIG-d")]

    placement = assign_cards(instances, 2, [health(0, 79)])

    assert placement.visible == ("MIG-c", "MIG-d")


def test_the_user_is_told_where_a_rank_went_or_that_it_stays() -> None:
    moved, stuck = assign_cards(FOUR, 3, [health(0, 79), health(1, 79)]).moves

    assert sentence(moved) == (
        "GPU 0 (GPU-0) reported Xid 79 (the GPU has fallen off the bus); local rank 0 moves to GPU 3 (GPU-3)"
    )
    assert sentence(stuck).endswith("; no other GPU is free, so local rank 1 is started on it again")


def test_errors_from_before_the_run_do_not_count() -> None:
    gpus = [{"index": 0, "uuid": "GPU-a", "ecc_uncorrected": 7, "ecc_before": 7}]
    assert [fault(card) for card in parse(json.dumps({"version": 1, "gpus": gpus}))] == [""]

    gpus[0]["ecc_uncorrected"] = 9
    (card,) = parse(json.dumps({"version": 1, "gpus": gpus}))
    assert "2 uncorrected ECC errors" in fault(card)
