"""Losses become findings; the text of a site becomes a place."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.analysis.finding import (
    DERIVED,
    ESTIMATED,
    MEASURED,
    NOWHERE,
    Loss,
    Place,
    findings_of,
    place_of,
)
from gpulaunch.profiler.record import Finding


def loss(rank: int, seconds: float, **changes) -> Loss:
    said = {
        "rank": rank,
        "seconds_per_step": seconds,
        "step_s": 0.1,
        "confidence": MEASURED,
        "evidence": {"of_rank": rank},
        "advice": "Do it otherwise.",
        **changes,
    }
    return Loss(**said)


@pytest.mark.parametrize(
    ("site", "place"),
    [
        ("train.py:41 main", Place(file="train.py", line=41)),
        ("train.py:41", Place(file="train.py", line=41)),
        ("my project/a b.py:7 <module>", Place(file="my project/a b.py", line=7)),
        ("odd:12 name.py:7 step", Place(file="odd:12 name.py", line=7)),
        ("built at a.py:3, moved at a.py:9", Place(file="a.py", line=3)),
        ("built at a dir/a.py:3, moved at a dir/a.py:9", Place(file="a dir/a.py", line=3)),
        ("ry/long/a.py:3, moved at a/very/long/a.py:9", Place(file="a/very/long/a.py", line=3)),  # cut at the front
        ("ed at a/very/very/long/a.py:9", Place(file="ed at a/very/very/long/a.py", line=9)),
        ("two\nlines.py:7 step", Place(file="two\nlines.py", line=7)),
        ("caf\udce9.py:7 step", Place(file="caf\udce9.py", line=7)),
        ("", NOWHERE),
        ("elsewhere", NOWHERE),
        ("train.py:x main", NOWHERE),
        (f"train.py:{'9' * 5000} main", NOWHERE),
    ],
)
def test_a_site_names_a_line(site: str, place: Place) -> None:
    assert place_of(site) == place


@given(st.text())
def test_any_text_is_a_place_or_none(site: str) -> None:
    place = place_of(site)

    assert (place.file is None) == (place.line is None)


def test_losses_at_one_line_are_one_finding_with_the_largest_of_them() -> None:
    """Ranks wait for each other: what the slowest loses, the job loses."""
    here, there = Place(file="a.py", line=1), Place(file="a.py", line=2)

    found = findings_of("a-rule", [loss(3, 0.01, place=here), loss(1, 0.02, place=here), loss(1, 0.03, place=there)])

    assert [(each.line, each.ranks, each.seconds_per_step) for each in found] == [(1, (1, 3), 0.02), (2, (1,), 0.03)]
    assert found[0].evidence == {"of_rank": 1}
    assert found[0].seconds_per_hour == pytest.approx(3600 * 0.02 / 0.1)


def test_losses_of_different_subjects_stay_apart() -> None:
    found = findings_of("a-rule", [loss(0, 0.01, subject="rank 0"), loss(1, 0.01, subject="rank 1")])

    assert [each.key for each in found] == [("a-rule", "", 0, "rank 0"), ("a-rule", "", 0, "rank 1")]


@pytest.mark.parametrize(
    ("changes", "is_sure"),
    [
        ({}, True),
        ({"confidence": DERIVED}, True),
        ({"confidence": ESTIMATED}, False),
        ({"confidence": ESTIMATED, "seconds_per_step": 0.0}, True),  # not of its seconds, and it claims none
        ({"confidence": DERIVED, "evidence": {"cause": "compute"}}, True),
        ({"confidence": DERIVED, "evidence": {"cause": "other"}}, False),
    ],
)
def test_a_verdict_that_is_not_sure_says_what_would_make_it_so(changes: dict[str, Any], is_sure: bool) -> None:
    (found,) = findings_of("a-rule", [replace(loss(3, 0.01), **changes)])

    more = "" if is_sure else " To verify: gpulaunch trace --steps 5 --rank 3."
    assert found.advice == f"Do it otherwise.{more}"


def test_a_finding_as_json_has_the_names_that_others_rely_on() -> None:
    finding = Finding(
        rule="a-rule",
        file="train.py",
        line=4,
        subject="",
        ranks=(0, 1),
        seconds_per_step=0.0123456789,
        seconds_per_hour=44.4,
        confidence=0.9,
        evidence={"share_ratio": 1 / 3, "cause": "input"},
        advice="Do it otherwise.",
    )

    assert json.loads(json.dumps(finding.as_json())) == {
        "rule": "a-rule",
        "file": "train.py",
        "line": 4,
        "subject": "",
        "ranks": [0, 1],
        "seconds_per_step": 0.0123457,
        "seconds_per_hour": 44.4,
        "confidence": 0.9,
        "evidence": {"share_ratio": 0.333333, "cause": "input"},
        "advice": "Do it otherwise.",
    }


def test_of_ranks_whose_memory_grows_the_one_that_is_full_first_is_told() -> None:
    losses = [loss(rank, 0.0, evidence={"hours_to_full": hours}) for rank, hours in enumerate((5.0, 0.4, 0.06, 0.5))]

    (found,) = findings_of("host-memory-growth", losses)

    assert (found.ranks, found.evidence["hours_to_full"]) == ((0, 1, 2, 3), 0.06)
