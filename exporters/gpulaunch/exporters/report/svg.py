"""Draws charts as static inline SVG, for every report: they work without scripts and in print.

Bars and plain lines only; zooming needs the extra `gpulaunch[report]`. A chart has a sentence on what it shows, and an
adjacent table has its values.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Final

from gpulaunch.exporters.report.document import Chart
from gpulaunch.exporters.report.formatting import amount
from gpulaunch.exporters.view.text import inert

COLOURS: Final = 12
"""Number of colours in the style sheet."""
DASHES: Final = 6
"""Number of dash patterns there, the solid line included."""
_WIDTH: Final = 760
_LEFT: Final = 96
_RIGHT: Final = 56
_ROW: Final = 24
_BAR: Final = 17
_HEIGHT: Final = 180
_TOP: Final = 14
_BOTTOM: Final = 22


def still(chart: Chart) -> str:
    """Return the chart as an SVG element."""
    body, height = _ROWS[chart.kind](chart) if chart.kind in _ROWS else _over_time(chart)
    name = html.escape(f"chart-{chart.id}", quote=True)
    return (
        f'<svg class="still" role="img" aria-labelledby="{name}-title {name}-desc" viewBox="0 0 {_WIDTH} {height}" '
        f'preserveAspectRatio="xMinYMin meet"><title id="{name}-title">{_text(chart.title)}</title>'
        f'<desc id="{name}-desc">{_text(chart.summary)}</desc>{body}</svg>'
    )


def _bars(chart: Chart) -> tuple[str, int]:
    """Draw one row per label, its series side by side."""
    sums = [sum(series.values[row] or 0.0 for series in chart.series) for row in range(len(chart.labels))]
    whole = 100.0 if chart.unit == "%" else max(sums, default=0.0) or 1.0
    room = _WIDTH - _LEFT - _RIGHT
    parts: list[str] = []
    for row, label in enumerate(chart.labels):
        y = _ROW * row + 4
        parts.append(_label(label, y))
        begin = 0.0
        for series in chart.series:
            value = series.values[row] or 0.0
            width = room * value / whole
            if width >= 0.05:
                parts.append(
                    f'<rect class="c{series.colour % COLOURS}" x="{_LEFT + begin:.1f}" y="{y}" width="{width:.1f}" '
                    f'height="{_BAR}"><title>{_text(f"{series.name}: {amount(value)} {chart.unit}")}</title></rect>'
                )
            begin += width
    return "".join(parts), _ROW * len(chart.labels) + 8


def _spans(chart: Chart) -> tuple[str, int]:
    """Draw one row per span, on one time axis."""
    end = max((span.end for span in chart.spans), default=0.0) or 1.0
    room = _WIDTH - _LEFT - _RIGHT
    parts: list[str] = []
    for row, span in enumerate(chart.spans):
        y = _ROW * row + 4
        begin = min(max(0.0, span.begin), end)
        x, width = _LEFT + room * begin / end, max(1.0, room * max(0.0, span.end - begin) / end)
        parts.append(_label(span.label, y))
        parts.append(
            f'<rect class="c{span.colour % COLOURS}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}">'
            f"<title>{_text(f'{span.label}: {span.text}')}</title></rect>"
        )
    bottom = _ROW * len(chart.spans) + 4
    parts.append(_time_axis(0.0, end, chart.time_unit, bottom + 14))
    return "".join(parts), bottom + _BOTTOM


def _over_time(chart: Chart) -> tuple[str, int]:
    """Draw values over time: stacked (`stack`), or separate (`lines`)."""
    count = len(chart.times)
    stacked = chart.kind == "stack"
    if stacked:
        tops = [sum(series.values[index] or 0.0 for series in chart.shown) for index in range(count)]
        low, high = 0.0, max(tops, default=0.0)
    else:
        known = [value for series in chart.shown for value in series.values if value is not None]
        low, high = min(known, default=0.0), max(known, default=0.0)
        low = 0.0 if low >= 0 and low < 0.7 * high else low
    high = high if high > low else low + 1.0
    room, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    x = [_LEFT + room * index / max(1, count) for index in range(count + 1)]

    def y(value: float) -> float:
        return _TOP + tall * (high - value) / (high - low)

    parts = [f'<path class="frame" d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}"/>']
    below = [0.0] * count
    for number, series in enumerate(chart.shown):
        colour = series.colour % COLOURS
        line = f"l{colour}" + (f" d{number % DASHES}" if number % DASHES else "")
        for begin, end in _runs(series.values):
            if stacked:
                upper = [below[index] + (series.values[index] or 0.0) for index in range(begin, end)]
                forth = "".join(f"V{y(top):.1f}H{x[begin + 1 + at]:.1f}" for at, top in enumerate(upper))
                back = "".join(f"V{y(below[index]):.1f}H{x[index]:.1f}" for index in range(end - 1, begin - 1, -1))
                parts.append(f'<path class="c{colour}" d="M{x[begin]:.1f} {y(below[begin]):.1f}{forth}{back}Z"/>')
                below[begin:end] = upper
            else:
                step = "".join(
                    f"{'L' if index > begin else 'M'}{(x[index] + x[index + 1]) / 2:.1f} "
                    f"{y(series.values[index] or 0.0):.1f}"
                    for index in range(begin, end)
                )
                parts.append(f'<path class="{line}" d="{step}h.1"/>')  # so that a single point is visible
    parts.append(f'<text class="end" x="{_LEFT - 6}" y="{_TOP + 8}">{_text(amount(high))}</text>')
    parts.append(f'<text class="end" x="{_LEFT - 6}" y="{_HEIGHT - _BOTTOM}">{_text(amount(low))}</text>')
    if chart.times:
        step_length = chart.times[1] - chart.times[0] if count > 1 else 0.0
        parts.append(_time_axis(chart.times[0] - step_length, chart.times[-1], chart.time_unit, _HEIGHT - 6))
    return "".join(parts), _HEIGHT


_ROWS: Final = {"bars": _bars, "spans": _spans}


def _runs(values: tuple[float | None, ...]) -> Iterator[tuple[int, int]]:
    """Yield the ranges without unknown values."""
    begin: int | None = None
    for index, value in enumerate((*values, None)):
        if value is not None and begin is None:
            begin = index
        elif value is None and begin is not None:
            yield begin, index
            begin = None


def _label(text: str, y: int) -> str:
    return f'<text class="end" x="{_LEFT - 6}" y="{y + 13}">{_text(text[:14])}</text>'


def _time_axis(begin: float, end: float, unit: str, y: int) -> str:
    return (
        f'<text x="{_LEFT}" y="{y}">{_text(f"{amount(max(0.0, begin))} {unit}")}</text>'
        f'<text class="end" x="{_WIDTH - _RIGHT}" y="{y}">{_text(f"{amount(end)} {unit}")}</text>'
    )


def _text(text: str) -> str:
    return html.escape(inert(text), quote=True)
