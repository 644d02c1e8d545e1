"""Texts, bars and curves, cell by cell."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.exporters.tui.cells import (
    bar,
    broken,
    cells,
    clip,
    curve_line,
    figure,
    fit,
    fit_end,
    pairs,
    spark,
    text_of,
    without_colours,
    wrap,
)


def test_a_curve_rises_from_0_to_its_most_and_shows_its_gaps() -> None:
    assert spark((0.0, 1.0, None, 2.0), 4) == "\u2581\u2585 \u2588"
    assert spark((0.0, 1.0, None, 2.0), 4, ascii_only=True) == "_= #"
    assert spark((0.0, 0.0), 2) == "\u2581\u2581"
    assert spark((), 3) == "   "
    assert spark((None,), 3) == "   "


def test_a_long_curve_is_drawn_by_its_means() -> None:
    assert spark(tuple([0.0] * 50 + [1.0] * 50), 4, ascii_only=True) == "__##"


def test_a_short_curve_stands_at_the_right() -> None:
    assert spark((1.0,), 3, ascii_only=True) == "  #"


def test_parts_of_a_bar_sum_to_its_width() -> None:
    thirds = [("A", "", 1 / 3), ("B", "", 1 / 3), ("C", "", 1 / 3)]

    assert text_of(bar(thirds, 10)) == "AAABBBBCCC"
    assert text_of(bar([("A", "", 0.5)], 10)) == "AAAAA     "
    assert text_of(bar([("A", "", 0.01), ("B", "", 0.99)], 10)) == "BBBBBBBBBB"
    assert text_of(bar([("A", "", 9.0), ("B", "", math.nan)], 4)) == "AAAA"


def test_wide_characters_take_two_cells() -> None:
    assert cells("ab\u4e16") == 4
    assert cells("e\u0301") == 1
    assert fit("\u4e16\u754c\u4e16", 4) == "\u4e16~ "
    assert fit_end("a/long/path.py", 8) == "~path.py"


@given(st.text(max_size=80), st.integers(0, 40))
def test_what_is_fit_fits(text: str, width: int) -> None:
    assert cells(fit(text, width)) == width
    assert cells(text_of(clip(((text, ""), (text, "")), width))) <= width


@given(st.text(max_size=200), st.integers(12, 60))
def test_what_is_wrapped_fits_and_loses_no_word(text: str, width: int) -> None:
    lines = wrap(text, width, indent="  ")

    assert max(map(cells, lines)) <= width
    assert "".join("".join(lines).split()) == "".join(text.split())


@given(st.text(max_size=200), st.integers(2, 60))
def test_what_is_broken_loses_nothing(text: str, width: int) -> None:
    parts = broken(text, width)

    assert "".join(parts) == text
    assert max(map(cells, parts)) <= width


def test_colours_go_and_other_commands_stay_to_be_shown() -> None:
    assert without_colours("\x1b[1;31merror\x1b[0m") == "error"
    assert without_colours("\x1b[2J") == "\x1b[2J"


def test_what_an_event_has_inside_is_told_in_words() -> None:
    """Where the time went, as run_ended has it."""
    spent = {"startup": 4.25, "productive": None, "restart": 0.0, "of\x1b[2J": "\x1b[31m"}

    assert pairs({"goodput_seconds": spent}) == "goodput_seconds=startup 4.25, of\\x1b[2J \\x1b[31m"


def test_what_is_now_is_not_what_was_where_nobody_measures_it_any_longer() -> None:
    """A step that takes long is still to end; what a queue has that nobody reads is not known. The most stays."""

    def told(*curve: float | None, lasts: bool) -> str:
        return text_of(curve_line("ready", curve, figure, 60, ascii_only=True, lasts=lasts))

    assert told(1.0, 3.0, 2.0, lasts=False).endswith(" 2.00, max 3.00")
    assert told(1.0, 3.0, 2.0, None, None, lasts=False).endswith(" 2.00, max 3.00"), "an interval that has just begun"
    assert told(1.0, 3.0, 2.0, None, None, None, lasts=False).endswith(" -, max 3.00")
    assert told(1.0, 3.0, 2.0, None, None, None, lasts=True).endswith(" 2.00, max 3.00")
