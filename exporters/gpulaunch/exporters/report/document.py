"""What is shown of a run, independent of the format: sections of sentences, tables and charts.

Raw text only: the writer of a format escapes it, once, and in one place.

The live page, the report and its Markdown are written from the same document.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from gpulaunch.exporters.view.figures import PROSE

_MOST_MOMENTS: Final = 12
"""Rows of a table that is made of curves."""


@dataclass(frozen=True)
class Paragraph:
    """A few sentences."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Facts about one thing: names and values."""

    caption: str
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Column:
    """A table column."""

    title: str
    number: bool = False
    """Aligned to the right."""
    code: bool = False
    """Program text: monospaced."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first cell of each row names it."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One quantity of a chart."""

    name: str
    values: tuple[float | None, ...]
    colour: int = 0
    """Index into the palette; it wraps around."""
    on_request: bool = False
    """Of one rank among many: drawn only where its reader asks for that rank."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One row of a chart of kind `spans`."""

    label: str
    begin: float
    end: float
    text: str
    colour: int = 0


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart, and its summary as text."""

    id: str
    title: str
    kind: Literal["bars", "stack", "lines", "spans"]
    """`bars`: one row per label. `stack` and `lines`: over time, the series stacked or separate. `spans`: from begin to
    end."""
    unit: str
    summary: str
    """What the chart shows, in a sentence: for readers who cannot see it."""
    labels: tuple[str, ...] = ()
    """Labels of the rows of `bars`, in each of which the series follow each other."""
    times: tuple[float, ...] = ()
    """Times of the values: ends of equal intervals, in `time_unit` since the run began."""
    time_unit: str = "s"
    series: tuple[Series, ...] = ()
    spans: tuple[Span, ...] = ()
    table: Table | None = None
    """The values in stretches; None: `as_table` makes one."""

    @property
    def shown(self) -> tuple[Series, ...]:
        """The series that are drawn without being asked for."""
        return tuple(series for series in self.series if not series.on_request)


Block: TypeAlias = Paragraph | Items | Facts | Table | Chart


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and its content."""

    id: str
    title: str
    blocks: tuple[Block, ...]
    parts: tuple[Section, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Document:
    """All that is shown of a run."""

    title: str
    status: str
    lead: tuple[str, ...]
    """What matters most, in sentences: how the run stands, then what it loses."""
    alarm: bool = False
    """Whether the first sentence says what went wrong."""
    figures: tuple[tuple[str, str], ...] = ()
    """The few that are looked at first: names and values."""
    sections: tuple[Section, ...]
    made: str = ""
    """Creation time, and program."""

    def charts(self) -> tuple[Chart, ...]:
        """Return all charts, in order."""
        return tuple(chart for section in self.sections for chart in _charts(section))


def as_table(chart: Chart) -> Table:
    """Return a chart's values as a table: all rows of bars and spans, some moments of curves."""
    if chart.kind == "spans":
        spans = tuple((span.label, span.text) for span in chart.spans)
        return Table(caption=chart.title, columns=(Column(""), Column("")), rows=spans)
    columns = tuple(Column(f"{series.name} ({chart.unit})", number=True) for series in chart.shown)
    if chart.kind == "bars":
        names, places = chart.labels, list(range(len(chart.labels)))
    else:
        places = list(range(len(chart.times)))[:: -max(1, math.ceil(len(chart.times) / _MOST_MOMENTS))][::-1]
        names = tuple(f"{PROSE.number(chart.times[place])} {chart.time_unit}" for place in places)
    rows: list[tuple[str, ...]] = [
        (name, *(PROSE.number(series.values[place]) for series in chart.shown))
        for name, place in zip(names, places, strict=True)
    ]
    first = Column("" if chart.kind == "bars" else "Since the start")
    return Table(caption=chart.title, columns=(first, *columns), rows=tuple(rows))


def rewritten(document: Document, by: Callable[[str], str]) -> Document:
    """Return the document with every text mapped by `by`, e.g. to hide secrets."""
    changed: Document = _rewritten(document, by)
    return changed


def _rewritten(value: Any, by: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return by(value)
    if isinstance(value, tuple):
        # The numbers of a curve are many, and are not text.
        return value if value and isinstance(value[0], float) else tuple(_rewritten(each, by) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        kept = {"id", "kind"}
        told = {each.name: getattr(value, each.name) for each in fields(value) if each.name not in kept}
        return replace(value, **{name: _rewritten(each, by) for name, each in told.items()})
    return value


def _charts(section: Section) -> list[Chart]:
    own = [block for block in section.blocks if isinstance(block, Chart)]
    return own + [chart for part in section.parts for chart in _charts(part)]
