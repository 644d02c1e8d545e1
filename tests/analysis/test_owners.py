"""A loss has one owner: a rank that is late because of a line of its own is told of by that line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from healthy_node import HEALTHY_MS, MS, STEPS, rank, site, window
from rule_cases import CASES, looping_rank, two_ranks

from gpulaunch.profiler.analysis.advisor import advise
from gpulaunch.profiler.analysis.owners import with_one_owner
from gpulaunch.profiler.analysis.window import Window


def late_by(phase: str, *ranks: int, samples: int = 30, **late: Any) -> Window:
    """Rank 1 is late by 30 ms in a phase; these ranks have a line in so many of 120 samples."""
    both = two_ranks({phase: HEALTHY_MS[phase] + 30.0, **late})
    calls = {"train.py:30": "PIL.Image.save"}
    line = {"samples": 120, "calling": {"train.py:30": samples}, "calls": calls, "gpu": None}
    return replace(both, ranks=tuple(replace(each, **line) if each.rank in ranks else each for each in both.ranks))


@pytest.mark.parametrize("phase", ["other", "forward"])
def test_a_line_that_only_the_late_rank_has_is_the_cause(phase: str) -> None:
    (found,) = advise(late_by(phase, 1))

    assert (found.rule, found.file, found.line, found.ranks) == ("hot-line", "train.py", 30, (1,))
    assert found.advice.endswith(" Only rank 1 does it, and the other ranks wait for it.")
    assert found.evidence["straggler_excess_seconds_per_step"] == pytest.approx(0.030)


@pytest.mark.parametrize(
    "seen",
    [late_by("other", 0, 1), late_by("other", 1, samples=12), late_by("optimizer", 1)],
    ids=["a line of all ranks", "one that takes little", "late by what it computes"],
)
def test_a_line_that_is_not_why_a_rank_is_late_leaves_it_a_straggler(seen: Window) -> None:
    assert "straggler" in [found.rule for found in advise(seen)]


def test_a_line_of_a_rank_that_is_not_late_is_a_finding_as_ever() -> None:
    alone = rank(1, samples=120, calling={"train.py:30": 30}, calls={"train.py:30": "json.dump"}, gpu=None)

    assert [found.rule for found in advise(window(rank(0), alone))] == ["hot-line"]


@pytest.mark.parametrize(
    ("line", "call", "told"),
    [
        ("train.py:90", "", []),
        ("train.py:90", "overlap", []),
        ("train.py:90", "random.choice", ["hot-line"]),
        ("train.py:99", "", ["hot-line"]),
        ("loss.py:90", "", ["hot-line"]),
    ],
    ids=["in the loop", "a function of the program", "of a library, which stays", "below it", "in another file"],
)
def test_a_line_in_a_loop_that_is_to_go_as_a_whole_is_told_by_the_loop(line: str, call: str, told: list[str]) -> None:
    seen = looping_rank(samples=90, calling={line: 30}, calls={line: call})

    assert [found.rule for found in advise(window(seen))] == ["small-operations-loop", *told]


def test_a_line_of_a_rank_without_the_loop_is_told_too() -> None:
    line = looping_rank(samples=90, calling={"train.py:90": 30}, calls={"train.py:90": ""}, looping={})
    seen = window(looping_rank(), replace(line, rank=1))

    assert {found.rule for found in advise(seen)} == {"hot-line", "small-operations-loop"}


def test_a_line_that_takes_more_than_what_the_loop_around_it_computes_is_told_too() -> None:
    seen = looping_rank(samples=80, calling={"train.py:90": 60}, calls={"train.py:90": ""})

    assert {found.rule for found in advise(window(seen))} == {"hot-line", "small-operations-loop"}


@pytest.mark.parametrize(("line", "together"), [("train.py:46", True), ("train.py:48", False)])
def test_a_line_directly_below_a_save_belongs_to_it(line: str, together: bool) -> None:
    saving = rank(
        phases_ms={"checkpoint": 20.0},
        sites=(site("save", "train.py:45 main", count=10, blocked_ns=20 * STEPS * MS),),
        samples=100,
        calling={line: 25},
        calls={line: "os.replace"},
        gpu=None,
    )
    line_s = 0.25 * saving.step_s

    found = {each.rule: each.seconds_per_step for each in advise(window(saving))}

    apart = {"checkpoint-stall": 0.020, "hot-line": line_s}
    assert found == pytest.approx({"checkpoint-stall": 0.020 + line_s} if together else apart)


@pytest.mark.parametrize(
    ("line", "logging", "told"),
    [("train.py:88", 30, ["small-collectives"]), ("train.py:90", 30, None), ("train.py:88", 100, None)],
    ids=["that is what logging takes", "another line", "logging takes much more"],
)
def test_a_line_that_logs_what_it_reduces_is_told_as_the_collectives(
    line: str, logging: int, told: list[str] | None
) -> None:
    """`self.log(..., sync_dist=True)` in Lightning."""
    reduces = CASES["small-collectives"].fault
    logs = replace(reduces, ranks=tuple(replace(each, samples=120, logged={line: logging}) for each in reduces.ranks))

    assert sorted(found.rule for found in advise(logs)) == (told or ["logging-stall", "small-collectives"])


@pytest.mark.parametrize(
    ("line", "samples", "told"),
    [
        ("train.py:88", 30, ["small-collectives"]),
        ("train.py:88", 400, ["hot-line"]),
        ("train.py:90", 400, ["hot-line", "small-collectives"]),
    ],
    ids=["little besides", "mostly pickle", "another line"],
)
def test_objects_that_all_ranks_send_each_other_are_told_once(line: str, samples: int, told: list[str]) -> None:
    reduces = CASES["small-collectives"].fault
    calls = {line: "torch.distributed.distributed_c10d.all_gather_object"}
    sends = tuple(replace(each, samples=500, calling={line: samples}, calls=calls, gpu=None) for each in reduces.ranks)

    assert sorted(found.rule for found in advise(replace(reduces, ranks=sends))) == told


@pytest.mark.parametrize(("line", "lines", "told"), [(31, "30-32", [31]), (33, "", [30, 33])])
def test_lines_that_follow_each_other_are_told_once_wherever_most_samples_are(
    line: int, lines: str, told: list[int]
) -> None:
    """With more samples another line of the group may be the first that has many; the earlier one stays for a while."""
    (early,) = advise(late_by("other", 1))
    before = replace(early, evidence={**early.evidence, "lines": "30-32", "samples": 100.0})
    later = replace(early, line=line, evidence={**early.evidence, "lines": lines, "samples": 200.0})

    assert [each.line for each in with_one_owner([before, later])] == told


def test_the_same_lines_of_two_ranks_are_told_once() -> None:
    """Each had another one of them as the first that has many samples."""
    (found,) = advise(late_by("other", 1))
    one = replace(found, ranks=(1,), line=31, evidence={**found.evidence, "lines": "30-31", "samples": 200.0})
    other = replace(one, ranks=(0,), line=30, seconds_per_hour=0.9 * found.seconds_per_hour)
    apart = replace(other, line=40, evidence={**found.evidence, "lines": "40-41"})

    assert [(each.line, each.ranks) for each in with_one_owner([other, one, apart])] == [(31, (0, 1)), (40, (0,))]


def test_slow_fetches_are_told_with_the_better_cure() -> None:
    """In a window a rank has one of both rules; of several windows both may stand."""
    (fewer,), (slower,) = (advise(CASES[f"dataloader-{rule}"].fault) for rule in ("too-few-workers", "slow-transform"))
    better = replace(slower, seconds_per_hour=2 * fewer.seconds_per_hour)

    assert with_one_owner([fewer, better]) == [better]
    assert len(with_one_owner([replace(fewer, ranks=(1,)), better])) == 2
