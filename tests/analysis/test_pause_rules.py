"""What comes now and then: saves, validation, collections."""

from __future__ import annotations

from dataclasses import replace

import pytest
from healthy_node import MS, NO_PAUSES, STEPS, rank, rules, site, window
from rule_cases import CASES

from gpulaunch.profiler.analysis.advisor import advise


def test_two_saves_say_nothing_of_how_often_they_come() -> None:
    few = rank(phases_ms={"checkpoint": 20.0}, sites=(site("save", count=2, blocked_ns=20 * STEPS * MS),))

    assert rules(window(few)) == []
    assert rules(window(replace(few, saves=3))) == ["checkpoint-stall"]


def test_what_saves_outside_of_its_phase_is_a_part_of_the_stall() -> None:
    """Renaming files, removing older ones: a tenth of the samples. Without a save in the window it is not told."""
    saves = rank(
        phases_ms={"checkpoint": 20.0},
        sites=(site("save", count=5, blocked_ns=20 * STEPS * MS),),
        saving_share=0.1,
    )
    (found,) = advise(window(saves))

    assert found.seconds_per_step == pytest.approx(0.020 + 0.1 * saves.step_s)
    assert found.evidence["seconds_beside_saves_per_step"] == pytest.approx(0.1 * saves.step_s)
    assert rules(window(rank(saving_share=0.1))) == []
    assert rules(window(replace(saves, phase_ns={**saves.phase_ns, "checkpoint": 1000}))) == []


def test_of_saves_that_mostly_write_memory_of_no_tensor_that_part_is_lost() -> None:
    case = CASES["checkpoint-stall"].fault.ranks[0]
    for spare, site_of_save, is_told in (
        (90, "train.py:88 step", True),
        (90, "", False),
        (40, "train.py:88 step", False),
    ):
        saved = {"site": site_of_save, "bytes": 100, "spare_bytes": spare}
        (found,) = advise(window(replace(case, facts={**case.facts, "saved": saved})))

        assert found.line == 88
        assert found.seconds_per_step == pytest.approx(0.018 if is_told else 0.020)
        assert ("clone()" in found.advice) == is_told


def test_what_comes_now_and_then_is_judged_over_the_long_window() -> None:
    """This window has the save, all of them together hardly any."""
    case = CASES["checkpoint-stall"]

    assert rules(replace(case.fault, longer=case.repaired)) == []
    assert rules(replace(case.repaired, longer=case.fault)) == ["checkpoint-stall"]


def test_a_line_is_told_where_most_collections_are_its() -> None:
    pauses = replace(NO_PAUSES, gc_collections=10, gc_ns_total=20 * STEPS * MS)
    for its_ms, line in ((19, 88), (9, None)):
        asks = site("gc", count=5, blocked_ns=its_ms * STEPS * MS), site("gc", "train.py:90 step", count=5)
        (found,) = advise(window(rank(phases_ms={"gc": 20.0}, pauses=pauses, sites=asks)))
        assert (found.rule, found.line) == ("gc-pauses", line)


def test_collections_outside_of_steps_are_no_loss() -> None:
    assert rules(window(rank(pauses=replace(NO_PAUSES, gc_collections=10, gc_ns_total=900 * STEPS * MS)))) == []


def test_a_long_validation_that_fills_the_window_is_told_by_its_part_of_the_whole_run() -> None:
    (found,) = advise(window(rank(phases_ms={"validation": 2000.0}, validation_share=0.3)))

    assert found.rule == "frequent-validation"
    assert found.advice.startswith("30% of the time is validation: 10% if it is 4 times less often")
