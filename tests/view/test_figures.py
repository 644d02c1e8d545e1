"""Quantities for people: the same in a report and on a terminal, but for room."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.exporters.view.figures import CELLS, PROSE, Style, count

SECONDS, TOOK, SIZE, RATIO = Style.seconds, Style.took, Style.size, Style.ratio
HERTZ, NUMBER = Style.hertz, Style.number
Of = Callable[[Style, float | None], str]


@pytest.mark.parametrize(
    ("of", "value", "prose", "cells"),
    [
        (SECONDS, 0.0, "0 s", "0s"),
        (SECONDS, 2e-5, "20 us", "20.0us"),
        (SECONDS, 0.0123, "12.3 ms", "12.3ms"),
        (SECONDS, 0.1024, "102 ms", "102ms"),
        (SECONDS, 0.99996, "1 s", "1.00s"),
        (SECONDS, -0.005, "-5 ms", "-5.00ms"),
        (SECONDS, 59.96, "1 min 00 s", "60.0s"),
        (SECONDS, 100.0, "1 min 40 s", "1m 40s"),
        (SECONDS, 7620.0, "2 h 07 min", "2h 07m"),
        (TOOK, 0.4, "0 s", "0s"),
        (TOOK, 42.9, "43 s", "43s"),
        (TOOK, 59.7, "1 min 00 s", "1m 00s"),
        (TOOK, 750, "12 min 30 s", "12m 30s"),
        (TOOK, 3 * 3600 + 240, "3 h 04 min", "3h 04m"),
        (TOOK, 2 * 86400 + 5 * 3600, "2 d 05 h", "2d 05h"),
        (TOOK, -5, "-5 s", "-5s"),
        (SIZE, 512, "512 B", "512B"),
        (SIZE, 1023.6, "1 KiB", "1.00K"),
        (SIZE, 1536, "1.5 KiB", "1.50K"),
        (SIZE, 1010 << 10, "1010 KiB", "1010K"),
        (SIZE, 140 << 30, "140 GiB", "140G"),
        (RATIO, 0.404, "40.4 %", "40%"),
        (HERTZ, 1.98e9, "1.98 GHz", "1.98GHz"),
        (HERTZ, 999.96e6, "1 GHz", "1.00GHz"),
        (HERTZ, 50, "50 Hz", "50.0Hz"),
        (NUMBER, 0, "0", "0.0"),
        (NUMBER, 9.81, "9.81", "9.81"),
        (NUMBER, 999.9, "1,000", "1.00k"),
        (NUMBER, 1240, "1,240", "1.24k"),
        (NUMBER, 3.4e6, "3,400,000", "3.40M"),
    ],
)
def test_a_quantity_in_a_sentence_and_in_a_cell(of: Of, value: float, prose: str, cells: str) -> None:
    assert (of(PROSE, value), of(CELLS, value)) == (prose, cells)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_not_known_is_a_dash(value: float | None) -> None:
    assert {of(style, value) for of in (SECONDS, TOOK, SIZE, RATIO, HERTZ, NUMBER) for style in (PROSE, CELLS)} == {"-"}
    assert count(value) == "-"


def test_a_count_has_all_its_digits() -> None:
    assert count(12340) == "12,340"


@given(st.floats(0, 1e15))
def test_no_figure_is_written_with_an_exponent_or_is_wider_than_its_cell(value: float) -> None:
    small = 0 < value < 1e-4
    assert all("e" not in of(PROSE, value) for of in (SECONDS, TOOK, SIZE, RATIO, HERTZ, NUMBER) if not small)
    assert all(len(of(CELLS, value)) <= 6 for of in (SIZE, NUMBER) if value < 1e14)


@pytest.mark.parametrize(
    ("name", "value", "words", "prose", "cells"),
    [
        ("step_seconds", 0.0712, "step", "71.2 ms", "71.2ms"),
        ("data_wait_seconds_per_step", 0.05, "data wait per step", "50 ms", "50.0ms"),
        ("bytes_per_step", 1 << 21, "bytes per step", "2 MiB", "2.00M"),
        ("copied_bytes_per_second", 12.5 * (1 << 30), "copied per second", "12.5 GiB", "12.5G"),
        ("fetch_cpu_ratio", 0.404, "fetch cpu", "40.4 %", "40%"),
        ("sm_clock_hertz", 1.98e9, "sm clock", "1.98 GHz", "1.98GHz"),
        ("workers", 4.0, "workers", "4", "4"),
        ("hours_to_full", 3.217, "hours to full", "3.22", "3.22"),
        ("step_seconds", math.nan, "step", "-", "-"),
    ],
)
def test_a_figure_is_told_in_the_unit_that_its_name_has(
    name: str, value: float, words: str, prose: str, cells: str
) -> None:
    assert (PROSE.measured(name, value), CELLS.measured(name, value)) == ((words, prose), (words, cells))
