"""What a report says, before anybody decides how it looks: sections of sentences, tables and charts. Raw text only:
whoever renders it escapes it, once, and in one place."""

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
    """What is known of one thing: names and their values."""

    caption: str
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Column:
    """Of a table."""

    title: str
    number: bool = False
    """Aligned to the right."""
    code: bool = False
    """Text of a program: in a fixed width."""


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
    """Number in the palette; it goes round."""


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
    """A picture, and the same in words."""

    id: str
    title: str
    kind: Literal["bars", "stack", "lines", "spans"]
    """`bars`: one row for each label, the series one after the other in it. `stack` and `lines`: over time, the
    series on top of each other, or each for itself. `spans`: from when to when."""
    unit: str
    summary: str
    """What one sees, in a sentence: for who does not see it."""
    labels: tuple[str, ...] = ()
    """Of the rows of `bars`."""
    times: tuple[float, ...] = ()
    """Of the values over time: ends of equal intervals, in `time_unit` since the run began."""
    time_unit: str = "s"
    series: tuple[Series, ...] = ()
    spans: tuple[Span, ...] = ()
    table: Table | None = None
    """The figures, where no table beside it has them."""


Block: TypeAlias = Paragraph | Items | Facts | Table | Chart


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, and what is below it."""

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
    """When, and by what."""

    def charts(self) -> tuple[Chart, ...]:
        """All charts, in their order."""
        return tuple(chart for section in self.sections for chart in _charts(section))


def rewritten(document: Document, by: Callable[[str], str]) -> Document:
    """The same with every text as `by` gives it: secrets hidden, say."""
    changed: Document = _rewritten(document, by)
    return changed


def _rewritten(value: Any, by: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return by(value)
    if isinstance(value, tuple):
        # Numbers of a curve are many, and no text.
        return value if value and isinstance(value[0], float) else tuple(_rewritten(each, by) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        kept = {"id", "kind"}
        told = {each.name: getattr(value, each.name) for each in fields(value) if each.name not in kept}
        return replace(value, **{name: _rewritten(each, by) for name, each in told.items()})
    return value


def _charts(section: Section) -> list[Chart]:
    own = [block for block in section.blocks if isinstance(block, Chart)]
    return own + [chart for part in section.parts for chart in _charts(part)]
