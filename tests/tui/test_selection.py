"""Which ranks, in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import views

from gpulaunch.exporters.tui.selection import SORTS, FilterError, Selection, chosen, filter_of, selected, told_ranks
from gpulaunch.exporters.view.model import RunView


def numbers(view: RunView, selection: Selection) -> list[int]:
    return [rank.rank for rank in chosen(view, selection)]


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("", list(range(16))),
        ("3", [3]),
        ("2-4", [2, 3, 4]),
        ("2-4, 9 12", [2, 3, 4, 9, 12]),
        ("n1", list(range(8, 16))),
        ("n1 0", [0, *range(8, 16)]),
        ("99", []),
        ("4-2", []),
    ],
)
def test_a_filter_lets_through_what_it_names(only: str, expected: list[int]) -> None:
    assert numbers(views.crowd(16), Selection(only=only)) == expected


def test_an_exclamation_mark_lets_through_what_is_marked() -> None:
    assert numbers(views.straggling(), Selection(only="!")) == [2, 3]
    assert numbers(views.healthy(), Selection(only="!")) == []


@pytest.mark.parametrize("typed", ["x", "1-", "-1", "n", "1;2", "!!", "\x1b[2J", "9" * 40])
def test_what_is_no_filter_says_what_one_is(typed: str) -> None:
    with pytest.raises(FilterError, match="ranks are 3 or 8-15"):
        filter_of(typed)


def test_the_slowest_by_itself_comes_first() -> None:
    """Together they all step alike: who is late is who waits least."""
    assert numbers(views.straggling(), Selection(sort="own step time")) == [3, 0, 1, 2]
    assert numbers(views.crowd(64), Selection(sort="own step time"))[0] == 37
    assert numbers(views.crowd(64), Selection(sort="own step time", reverse=True))[-1] == 37


def test_equals_are_in_the_order_of_their_numbers() -> None:
    for name in SORTS:
        assert numbers(views.healthy(), Selection(sort=name)) == [0, 1]
    assert numbers(views.healthy(), Selection(reverse=True)) == [1, 0]


def test_what_is_not_known_comes_last() -> None:
    view = views.straggling()
    view = replace(view, ranks=(replace(view.ranks[0], step_seconds_now=None), *view.ranks[1:]))

    assert numbers(view, Selection(sort="step time"))[-1] == 0
    assert numbers(view, Selection(sort="step time", reverse=True))[-1] == 0


def test_a_selected_rank_that_is_filtered_away_gives_way_to_the_first() -> None:
    view = views.crowd(16)

    assert getattr(selected(view, Selection(rank=9)), "rank", None) == 9
    assert getattr(selected(view, Selection(rank=9, only="3-5")), "rank", None) == 3
    assert selected(view, Selection(rank=9, only="99")) is None


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((), "no rank"),
        ((3,), "rank 3"),
        ((0, 1), "ranks 0, 1"),
        ((0, 1, 2, 3, 9), "ranks 0-3, 9"),
        (tuple(range(0, 40, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... 20 in all"),
    ],
)
def test_ranks_are_told_in_runs(ranks: tuple[int, ...], expected: str) -> None:
    assert told_ranks(ranks) == expected
