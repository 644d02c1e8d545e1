"""What the tests over a real Prometheus would find wrong, they find: here with answers that nobody gave."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exprs import queries
from scene import Answer, Target, wrong_with

QUERY = next(query for query in queries() if query.panel == "Own work in a step, by rank")
NAN = float("nan")


def test_a_good_answer_has_nothing_wrong() -> None:
    answer = Answer(series=(({"rank": "0"}, [0.1, 0.2]), ({"rank": "1"}, [0.0, 0.1])))

    assert wrong_with(QUERY, answer) == []


@pytest.mark.parametrize(
    ("series", "complaint"),
    [
        ((({"rank": "0"}, [0.1, NAN]),), "{'rank': '0'} is nan"),
        ((({"rank": "0"}, [float("inf"), NAN]),), "{'rank': '0'} is inf"),
        ((({"rank": "0"}, [-0.1]),), "{'rank': '0'} is below zero: -0.1"),
        ((({"gpu": "0"}, [0.1]),), "no label rank in {'gpu': '0'}"),
        ((({"rank": "0", "a": "1"}, [0.1]), ({"rank": "0", "a": "2"}, [0.1])), "two lines have one name: {{rank}}"),
    ],
)
def test_a_bad_answer_is_found(series: tuple[tuple[dict[str, str], list[float]], ...], complaint: str) -> None:
    assert wrong_with(QUERY, Answer(series=series)) == [complaint]


def test_what_may_be_below_zero_may() -> None:
    assert wrong_with(replace(QUERY, signed=True), Answer(series=(({"rank": "0"}, [-0.1]),))) == []


def test_a_variable_that_nobody_knows_is_not_sent() -> None:
    with pytest.raises(AssertionError):
        Target(run="r", node="n").into("$rank $world")
