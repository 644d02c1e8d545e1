"""Charts of one line, cell by cell; and text of all kinds."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gpulaunch.exporters.tui.charts import Bar, Chart, Line, NamedCurve, Spark
from gpulaunch.exporters.tui.once import as_text
from gpulaunch.exporters.tui.text import figure, pairs, plain, without_colours


def drawn(chart: Chart, width: int, *, ascii_only: bool = False) -> str:
    return as_text(iter([chart]), width, ascii_only=ascii_only).rstrip("\n")


def test_a_curve_rises_from_0_to_its_most_and_shows_its_gaps() -> None:
    assert drawn(Spark((0.0, 1.0, None, 2.0)), 4) == "\u2581\u2585 \u2588"
    assert drawn(Spark((0.0, 1.0, None, 2.0)), 4, ascii_only=True) == "_= #"
    assert drawn(Spark((0.0, 0.0)), 2) == "\u2581\u2581"
    assert drawn(Spark(()), 3) == ""
    assert drawn(Spark((None,)), 3) == ""


def test_a_long_curve_is_drawn_by_its_means() -> None:
    assert drawn(Spark(tuple([0.0] * 50 + [1.0] * 50)), 4, ascii_only=True) == "__##"
    assert drawn(Spark((0.0, 1.0)), 1, ascii_only=True) == "="
    assert drawn(Spark((0.0, 1.0), merge=max), 1, ascii_only=True) == "#"


def test_a_short_curve_stands_at_the_right() -> None:
    assert drawn(Spark((1.0,)), 3, ascii_only=True) == "  #"


def test_parts_of_a_bar_sum_to_its_width() -> None:
    thirds = {"data_wait": 1 / 3, "forward": 1 / 3, "backward": 1 / 3}

    assert drawn(Bar(thirds), 10) == "DDDFFFFBBB"
    assert len(Bar({"data_wait": 0.5}).draw(10)) == 10
    assert drawn(Bar({"data_wait": 0.5}), 10) == "DDDDD"
    assert drawn(Bar({"data_wait": 0.01, "forward": 0.99}), 10) == "FFFFFFFFFF"
    assert drawn(Bar({"data_wait": 9.0, "forward": math.nan}), 4) == "DDDD"
    assert drawn(Bar({"of tomorrow": 1.0}), 4) == "????"


def test_a_line_that_does_not_fit_is_cut_off_visibly() -> None:
    assert drawn(Line("\u4e16\u754c\u4e16"), 4) == "\u4e16 ~"
    assert drawn(Line("e\u0301"), 1) == "e\u0301"
    assert drawn(Line("four"), 4) == "four"
    assert drawn(Line(("fi", "bold"), "ve!"), 4) == "fiv~"


@given(st.text(max_size=80), st.integers(1, 40))
def test_what_is_on_one_line_fits(text: str, width: int) -> None:
    assert cell_len(drawn(Line(plain(text), plain(text)), width)) <= width


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
        return drawn(NamedCurve("ready", curve, figure, lasts=lasts), 60)

    assert told(1.0, 3.0, 2.0, lasts=False).endswith(" 2.00, max 3.00")
    assert told(1.0, 3.0, 2.0, None, None, lasts=False).endswith(" 2.00, max 3.00"), "an interval that has just begun"
    assert told(1.0, 3.0, 2.0, None, None, None, lasts=False).endswith(" -, max 3.00")
    assert told(1.0, 3.0, 2.0, None, None, None, lasts=True).endswith(" 2.00, max 3.00")
