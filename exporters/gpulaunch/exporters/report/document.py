"""The content of a report, independent of its format: sections of sentences, tables and charts. Raw text only: the
renderer escapes it, once, and in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeAlias


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
    """`bars`: one row per label, with the series side by side in it. `stack` and `lines`: over time, the series
    stacked or separate. `spans`: from begin to end."""
    unit: str
    summary: str
    """What the chart shows, in a sentence: for readers who cannot see it."""
    labels: tuple[str, ...] = ()
    """Labels of the rows of `bars`."""
    times: tuple[float, ...] = ()
    """Times of the values: ends of equal intervals, in `time_unit` since the run began."""
    time_unit: str = "s"
    series: tuple[Series, ...] = ()
    spans: tuple[Span, ...] = ()
    table: Table | None = None
    """The values, if no adjacent table has them."""


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
    """The whole report."""

    title: str
    status: str
    lead: tuple[str, ...]
    """What matters most, in sentences."""
    sections: tuple[Section, ...]
    made: str = ""
    """Creation time, and program."""

    def charts(self) -> tuple[Chart, ...]:
        """Return all charts, in order."""
        return tuple(chart for section in self.sections for chart in _charts(section))


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
