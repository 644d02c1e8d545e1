"""The table of which fault moves which panel is whole, and what does not move is found: all without Prometheus."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exprs import queries
from moves import FACTS, MOVES, SCENES, Move, Panel, all_panels, limited, moves_of, past_already, unmoved
from scene import Album, Answer
from shown import SHOWS

PACE = Panel("overview", "Step time", "timeseries")
HANGS = Panel("overview", "Hangs", "stat")
CALLS = Panel("ranks", "The last collective of each rank", "table")


def test_every_panel_moves_in_some_scene_or_tells_what_never_changes() -> None:
    there = {(panel.dashboard, panel.title) for panel in all_panels()}
    moving = {panel for panel, _ in moves_of("many")}

    assert there - set(MOVES) == FACTS
    assert set(MOVES) - there == set()
    assert [str(panel) for panel in set(all_panels()) - moving if (panel.dashboard, panel.title) not in FACTS] == []


def test_few_panels_are_said_never_to_change_and_those_only_list_facts() -> None:
    kinds = {panel.kind for panel in all_panels() if (panel.dashboard, panel.title) in FACTS}

    assert len(FACTS) < len(all_panels()) / 40
    assert kinds == {"table"}


def test_every_scene_of_the_story_is_one_of_the_table() -> None:
    assert tuple(SHOWS) == SCENES
    assert {move.scene for moves in MOVES.values() for move in moves} == {*SCENES[1:]}


def test_the_real_run_moves_in_every_scene_that_it_has() -> None:
    """The last one is of the made-up run alone: most of it needs GPUs, or a machine that is worse off than ours."""
    moving = {scene: [panel for panel, move in moves_of("real") if move.scene == scene] for scene in SCENES[1:]}

    assert [len(panels) > 3 for panels in moving.values()] == [True, True, True, False]
    gpus = {(query.dashboard, query.panel) for query in queries() if query.needs_gpu}
    assert [
        str(panel) for panels in moving.values() for panel in panels if (panel.dashboard, panel.title) in gpus
    ] == []


@pytest.mark.parametrize(("place", "moves"), MOVES.items(), ids=map(" / ".join, MOVES))
def test_a_move_is_of_what_its_panel_shows(place: tuple[str, str], moves: tuple[Move, ...]) -> None:
    """Its legends and labels are there; and who has a limit moves past it, or says why not."""
    asked = [query for query in queries() if (query.dashboard, query.panel) == place]
    panels = [panel for panel in all_panels() if (panel.dashboard, panel.title) == place]
    shown = " ".join(each for query in asked for each in (query.legend, *query.columns))

    for move in moves:
        assert move.legend in (None, *(query.legend for query in asked))
        assert move.times >= 1
        assert move.by >= 0
        assert [label for label in move.labels if label not in shown] == []
        assert move.way != "rows" or all(panel.kind == "table" for panel in panels)
        assert move.way != "past" or any(map(limited, panels))
    if any(map(limited, panels)):
        assert any(move.way == "past" or move.why for move in moves)


# --- how it is measured ----------------------------------------------------------------------------------------------


def album(panel: Panel, *series: tuple[dict[str, str], float]) -> Album:
    """A picture in which one panel shows something."""
    asked = [each for each in queries() if (each.dashboard, each.panel, each.kind) == _key(panel)]
    answer = Answer(series=tuple((labels, [value]) for labels, value in series))
    return Album(answers={query: answer if query == asked[0] else Answer() for query in asked})


def _key(panel: Panel) -> tuple[str, str, str]:
    return panel.dashboard, panel.title, panel.kind


@pytest.mark.parametrize(
    ("way", "before", "after", "moves"),
    [
        ("up", 1.0, 1.6, True),
        ("up", 1.0, 1.4, False),
        ("up", 1.0, 0.1, False),
        ("up", 0.0, 0.1, True),
        ("up", 0.0, 0.0, False),
        ("down", 1.0, 0.6, True),
        ("down", 1.0, 0.7, False),
        ("down", 0.0, 0.0, False),
    ],
)
def test_up_and_down_are_more_than_chance(way: str, before: float, after: float, moves: bool) -> None:
    move = Move(scene="trouble", way=way)
    pictures = [album(PACE, ({}, value)) for value in (before, after)]

    assert (move.missing(PACE, *pictures) == "") is moves


def test_so_much_may_be_asked_for_besides() -> None:
    move = Move(scene="trouble", way="up", times=1, by=0.2)
    first, second, third = (album(PACE, ({}, value)) for value in (0.5, 0.6, 0.8))

    assert move.missing(PACE, first, second) == "from 0.5 to 0.6 is not up"
    assert move.missing(PACE, first, third) == ""


def test_past_a_limit_is_within_it_before() -> None:
    move = Move(scene="trouble", way="past")
    without, with_one = (album(HANGS, ({}, value)) for value in (0, 1))

    assert move.missing(HANGS, without, with_one) == ""
    assert move.missing(HANGS, without, without) == "past its limit before and then: [False, False], [[0], [0]]"
    assert move.missing(HANGS, with_one, with_one) == "past its limit before and then: [True, True], [[1], [1]]"
    assert move.missing(HANGS, without, album(HANGS)) == "past its limit before and then: [False, False], [[0], []]"


def test_only_the_series_that_are_meant_count() -> None:
    move = replace(Move(scene="trouble", way="up"), labels={"rank": "1"})
    before = album(PACE, ({"rank": "0"}, 1.0), ({"rank": "1"}, 1.0))

    assert move.missing(PACE, before, album(PACE, ({"rank": "0"}, 1.0), ({"rank": "1"}, 9.0))) == ""
    assert move.missing(PACE, before, album(PACE, ({"rank": "0"}, 9.0), ({"rank": "1"}, 1.0))) != ""


def test_a_table_moves_with_its_rows() -> None:
    move = Move(scene="trouble", way="rows")
    labels = {"rank": "0", "kind": "all_reduce"}
    inside, outside = (album(CALLS, (labels | {"state": state}, 1)) for state in ("running", "returned"))

    assert move.missing(CALLS, outside, inside) == ""
    assert move.missing(CALLS, inside, inside) == "1 rows as before"
    assert move.missing(CALLS, inside, album(CALLS)) == ""


def test_a_run_without_any_fault_moves_no_panel() -> None:
    nothing = Album(answers=dict.fromkeys(queries(), Answer()))
    for run in ("real", "many"):
        for scene in SCENES[1:]:
            about = [panel for panel, move in moves_of(run) if move.scene == scene]

            assert len(unmoved(run, scene, nothing, nothing)) == len(about)
            assert past_already(run, scene, nothing) == []


def test_what_is_past_too_early_is_found() -> None:
    """Unless it is of an earlier scene, or of the same."""
    hung = album(HANGS, ({}, 1))

    assert past_already("many", "restarted", hung) == ["overview / Hangs (stat), all {}: 1"]
    assert past_already("many", "trouble", hung) == []
    assert past_already("real", "restarted", hung) == []
