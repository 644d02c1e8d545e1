"""Growth is told from noise, from a step, and from a cache that fills."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.analysis.trend import Series, growth_of


def test_a_straight_line_is_growth() -> None:
    growth = growth_of([(float(x), 5.0 + 2.0 * x) for x in range(8)])

    assert growth is not None
    assert (growth.per_x, growth.total) == pytest.approx((2.0, 14.0))


def test_a_third_of_the_points_may_lie_anywhere() -> None:
    points = [(float(x), 5.0 + 2.0 * x) for x in range(12)]
    for at, wrong in ((1, 900.0), (5, -900.0), (8, 400.0)):
        points[at] = (points[at][0], wrong)

    growth = growth_of(points)

    assert growth is not None
    assert growth.per_x == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize(
    "values",
    [
        [5.0] * 8,
        [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0],
        [0.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0],
        [0.0, 30.0, 60.0, 90.0, 100.0, 100.0, 100.0, 100.0],
        [5.0],
        [],
    ],
    ids=["level", "falling", "a jump", "filled", "one point", "none"],
)
def test_what_does_not_go_on_growing_is_none(values: list[float]) -> None:
    assert growth_of([(float(x), y) for x, y in enumerate(values)]) is None


@given(st.lists(st.floats(-1e12, 1e12), max_size=30))
def test_any_points_have_growth_or_none(values: list[float]) -> None:
    growth = growth_of([(float(x), y) for x, y in enumerate(values)])

    assert growth is None or growth.total > 0


def test_points_at_one_moment_have_no_slope() -> None:
    assert growth_of([(1.0, 1.0), (1.0, 5.0), (1.0, 9.0)]) is None


@given(st.integers(2, 40), st.integers(0, 3000))
def test_a_series_stays_small_and_reaches_from_its_beginning_to_now(most: int, count: int) -> None:
    series = Series[int](most)
    for point in range(count):
        series.add(point)

    points = series.points
    assert len(points) < most
    assert list(points) == sorted(set(points))
    if count:
        assert points[0] == 0
        gaps = [after - before for before, after in zip(points, (*points[1:], count), strict=True)]
        assert max(gaps) <= 2 * max(1, 2 * count // most)
