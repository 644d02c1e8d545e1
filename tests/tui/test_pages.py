"""What is on the screen, for runs of every kind: as text, without a terminal."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import views
from golden_frames import FRAMES, GOLDEN, ONCE, drawn
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gpulaunch.exporters.tui.charts import GOODPUT, PHASES
from gpulaunch.exporters.tui.layout import HELP
from gpulaunch.exporters.tui.once import as_text, once
from gpulaunch.exporters.tui.pages import PAGES
from gpulaunch.exporters.tui.selection import Selection, marks_of
from gpulaunch.exporters.tui.summary import summary
from gpulaunch.exporters.tui.tables import Column, fitting, rich_table
from gpulaunch.exporters.view.model import AttemptView, RunView, StallView, Status
from gpulaunch.exporters.view.text import inert
from gpulaunch.profiler.channel import layout
from gpulaunch.profiler.record import GOODPUT_BUCKETS

VIEWS = {
    "healthy": views.healthy(),
    "input_bound": views.input_bound(),
    "straggling": views.straggling(),
    "restarted": views.restarted(),
    "failed": views.failed(),
    "finished": views.finished(),
    "stopped": views.stopped(),
    "crowd": views.crowd(64),
    "nothing": views.nothing(),
    "hostile": views.hostile(),
}
NAMES = [page.name for page in PAGES]


def text(
    view: RunView, page: str = "ranks", selection: Selection | None = None, width: int = 80, *, ascii_only: bool = False
) -> str:
    """The summary and a page, as the application shows them, and not cut off at the bottom."""
    selection = selection or Selection()
    (shown,) = (each for each in PAGES if each.name == page)
    parts = [summary(view), *shown.text(view, selection)]
    if rows := shown.rows(view, selection):
        parts.append(rich_table(shown.columns, view, rows, marks_of(view), width))
    parts += shown.below(view, selection)
    return as_text(iter(parts), width, ascii_only=ascii_only)


# -- as it looks


@pytest.mark.parametrize("name", [*FRAMES, *ONCE])
def test_a_frame_is_as_it_was_read_and_found_good(name: str) -> None:
    assert drawn(name) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_no_golden_frame_is_forgotten() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted([*FRAMES, *ONCE])


@pytest.mark.parametrize("page", NAMES)
def test_a_page_is_never_wider_than_the_screen(page: str) -> None:
    for view, width in product(VIEWS.values(), [1, 39, 40, 57, 80, 96, 133, 250]):
        assert max(map(cell_len, text(view, page, width=width).splitlines())) <= width


def test_help_fits_a_small_terminal_and_names_every_letter() -> None:
    assert max(map(len, HELP.splitlines())) <= 80
    assert len(HELP.splitlines()) <= 23
    for phase, (letter, _) in PHASES.items():
        assert f"{letter} {phase}" in HELP


# -- nothing that a terminal obeys


def test_what_is_hostile_is_hostile() -> None:
    """The control of the test below: shown as it is, this text would fail it."""
    assert inert(views.HOSTILE) != views.HOSTILE


@pytest.mark.parametrize("page", NAMES)
def test_no_text_of_a_run_reaches_the_terminal_as_a_command(page: str) -> None:
    shown = text(views.hostile(), page, Selection(rank=0, only=views.HOSTILE), width=400).splitlines()

    assert [each for each in shown if inert(each) != each] == []
    assert any("\\x1b[31mred" in each for each in shown)


def test_nor_does_what_is_printed_once() -> None:
    printed = once(views.hostile(), 100)

    assert [each for each in printed.splitlines() if inert(each) != each] == []
    assert printed.count("\\x1b[31mred") > 10


@given(
    name=st.text(max_size=60),
    figure=st.one_of(st.none(), st.floats()),
    shares=st.dictionaries(st.text(max_size=12), st.floats(), max_size=4),
    curve=st.lists(st.one_of(st.none(), st.floats()), max_size=40),
    page=st.sampled_from(NAMES),
    width=st.integers(1, 140),
)
def test_any_text_and_any_figure_make_a_frame(
    name: str,
    figure: float | None,
    shares: dict[str, float],
    curve: list[float | None],
    page: str,
    width: int,
) -> None:
    view = views.input_bound()
    odd = replace(
        view.ranks[0],
        steps_per_second_now=figure,
        step_seconds_now=figure,
        last_step_s=figure,
        phase_ratios_now=shares,
        steps_per_second=tuple(curve),
        rss_bytes={name: tuple(curve)},
    )
    view = replace(
        view,
        name=name,
        error=name,
        elapsed_seconds=figure,
        goodput_ratio=figure,
        phase_ratios_now=shares,
        goodput_seconds=shares,
        steps_per_second=tuple(curve),
        ranks=(odd, view.ranks[1]),
        findings=(replace(view.findings[0], advice=name, lost_seconds=figure, seconds_per_step=figure or 0.0),),
    )

    lines = text(view, page, width=width).splitlines()

    assert [each for each in lines if inert(each) != each or cell_len(each) > width] == []
    assert once(view, 80)


# -- without colours


def test_every_phase_has_a_letter_of_its_own() -> None:
    for letters, names in ((PHASES, layout.PHASES), (GOODPUT, GOODPUT_BUCKETS)):
        assert tuple(letters) == names
        assert len({letter for letter, _ in letters.values()}) == len(names)


def test_a_terminal_without_blocks_gets_ascii() -> None:
    for page in NAMES:
        assert text(views.input_bound(), page, width=120, ascii_only=True).isascii()
    assert once(views.input_bound(), 80, ascii_only=True).isascii()
    assert not text(views.input_bound()).isascii()


# -- what is not known is not 0


def test_what_is_not_known_is_a_dash() -> None:
    shown = text(views.nothing())

    assert "- steps  - steps/s  - a step  attempt -" in shown
    assert "goodput -" in shown
    assert "job.json is missing" in shown


def test_where_it_is_not_known_what_was_made_again_goodput_is_the_most_that_it_can_be() -> None:
    view = views.restarted()
    unknown = replace(view, goodput_seconds={**view.goodput_seconds, "lost_work": None})

    shown = text(unknown, "history")
    assert "goodput at most 80%" in shown
    assert "lost work is unknown: specify the directory of the program's checkpoints" in shown
    assert "at most" not in text(view, "history")


# -- how long an attempt lasted


def test_an_earlier_attempt_whose_launcher_was_killed_did_not_last_until_now() -> None:
    """Nobody has said when it ended; the next run in the directory began two minutes after it, and goes on."""
    view = views.healthy()
    began_s = views.BEGAN_S - 120
    lost = AttemptView(number=0, directory=0, earlier=True, status=Status.LOST, began_s=began_s)
    again = AttemptView(number=0, directory=1, status=Status.RUNNING, began_s=views.BEGAN_S + 10)

    shown = text(replace(view, attempts=(lost, again)), "history")

    assert "attempts/0 (earlier run): lost -2m 00s, at most 2m 00s\n" in shown
    assert "attempt 0: running +10s, 12m 20s" in shown


def test_nor_did_one_beyond_the_next_attempt_of_its_own_run() -> None:
    first = AttemptView(number=0, status=Status.UNKNOWN, began_s=views.BEGAN_S)
    second = AttemptView(number=1, status=Status.RUNNING, began_s=views.BEGAN_S + 60)

    shown = text(replace(views.healthy(), attempts=(first, second)), "history")

    assert "attempt 0: unknown +0s, at most 1m 00s" in shown
    assert "attempt 1: running +1m 00s, 11m 30s" in shown


# -- marks


def test_the_rank_that_the_others_wait_for_is_marked_and_no_other() -> None:
    shown = text(views.straggling())

    assert re.findall(r"^ +(\d+) .* late$", shown, re.M) == ["3"]


def test_a_straggler_of_earlier_is_not_marked() -> None:
    view = views.straggling()

    assert " - late" in text(view)
    assert " - late" not in text(replace(view, findings=(replace(view.findings[0], active=False),)))


def test_of_a_run_that_is_over_what_stood_until_the_end_is_told() -> None:
    over = replace(views.straggling(), status=Status.FINISHED)
    changed_meanwhile = replace(over.findings[0], active=False)

    assert "straggler (rank 3)" in text(over)
    assert "straggler (rank 3)" not in text(replace(over, findings=(changed_meanwhile,)))


def test_a_rank_that_makes_no_steps_is_marked_while_the_run_goes_on() -> None:
    view = views.straggling()

    assert "still 40s" in text(view)
    assert "still" not in text(replace(view, status=Status.FINISHED))
    assert "still" not in text(views.healthy())


def test_a_slow_step_is_not_a_still_rank() -> None:
    """Steps of half a minute: 40 s after the last one, nothing is odd."""
    view = views.straggling()
    slow = tuple(replace(rank, steps=20, step_seconds=600.0) for rank in view.ranks)

    assert "still" not in text(replace(view, ranks=slow))


def test_a_rank_without_a_profiler_is_marked() -> None:
    view = views.healthy(ranks=(views.rank(0), views.rank(1, armed=False)))

    assert re.findall(r"^ +(\d+) .* off$", text(view), re.M) == ["1"]


def test_a_run_that_says_nothing_new_tells_for_how_long() -> None:
    view = views.healthy()

    assert "nothing new" not in text(view)
    assert "nothing new for 2m 00s" in text(replace(view, made_s=views.SEEN_S + 120))
    assert "nothing new" not in text(replace(views.finished(), made_s=views.SEEN_S + 120))


def test_a_standstill_stands_on_top_as_long_as_it_lasts() -> None:
    stall = StallView(what="rank 1 is in data.py:31 sleep()", since_s=views.SEEN_S - 63, due_s=None)

    assert "no progress for 1m 03s: rank 1 is in data.py:31 sleep()" in text(
        replace(views.healthy(), stall=stall, made_s=views.SEEN_S)
    )
    assert "no progress" not in text(views.healthy())


def test_of_a_run_that_is_over_nothing_is_odd_that_is_not_known() -> None:
    assert " off" not in text(replace(views.finished(), ranks=(views.rank(0, armed=False),)))


# -- a rank that made no steps lately


def quiet(steps: int) -> RunView:
    bare = {"steps_per_second_now": None, "step_seconds_now": None}
    ranks = tuple(replace(rank, steps=steps, phase_ratios_now={}, **bare) for rank in views.healthy().ranks)
    return replace(views.healthy(), ranks=ranks, phase_ratios_now={}, **bare)


@pytest.mark.parametrize(("steps", "told"), [(7000, "no steps lately"), (0, "no steps ")])
def test_that_it_made_none_lately_is_news_but_not_of_one_that_never_did(steps: int, told: str) -> None:
    shown = text(quiet(steps))

    assert "- steps/s  - a step" in shown
    assert shown.count(told) == 2
    assert ("lately" in shown) is (steps > 0)


# -- many ranks


def test_one_slow_rank_of_256_sticks_out() -> None:
    curve = next(each for each in text(views.crowd(256)).splitlines() if each.startswith("256 ranks"))

    assert "most 92.0ms rank 37" in curve
    assert curve.count("\u2588") == 1


# -- the columns


def test_columns_fill_the_width_and_go_where_there_is_none() -> None:
    (ranks,) = (page for page in PAGES if page.name == "ranks")

    for width in (79, 99, 100, 160):
        shown = fitting(ranks.columns, views.crowd(64), width)
        assert width - 3 <= sum(cells + 1 for _, cells in shown) < width
    assert "NODE" not in [column.title for column, _ in fitting(ranks.columns, views.healthy(), 160)]
    assert [column.title for column, _ in fitting(ranks.columns, views.healthy(), 40)] == [
        *("RANK", "STEPS/S", "STEP", "DATA", "PHASES", "MARK")
    ]


def test_every_title_has_room_and_every_table_begins_with_the_rank() -> None:
    tables: list[tuple[Column, ...]] = [page.columns for page in PAGES if page.columns]

    assert [columns[0].title for columns in tables] == ["RANK"] * 3
    assert [column.title for columns in tables for column in columns if len(column.title) > column.width] == []
