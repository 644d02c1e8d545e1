"""Declares the quantities of a record: where each lies in a rank's segment, how it adds up, and which metric shows it.

    @quantities
    class Pauses:
        gc_collections: int = counter("gc_collections_total", "Runs of the garbage collector of Python.")

A record is a frozen dataclass. On the class itself every quantity is the index of its (first) word in the segment:

    words[Pauses.gc_collections] += 1      in the rank: measured
    pauses.gc_collections                  anywhere else: read

The unit is in the name, and decides what a metric shows: `_ns` and `_ns_total` are shown in seconds, `_ppm` as a ratio.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import Any, ClassVar, Final, Protocol, TypeVar, dataclass_transform

from gpulaunch.profiler.channel.layout import QUANTITIES_END, QUANTITIES_FIRST


class Record(Protocol):
    """A frozen dataclass whose fields are quantities."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T")
R = TypeVar("R", bound=Record)

_KEY: Final = "quantity"
_ATTRIBUTE: Final = "__quantities__"
_PREFIX: Final = "gpulaunch_"
_ANYWHERE: Final = -1
_DIVISORS: Final = {"_ns": 1e9, "_ns_total": 1e9, "_ppm": 1e6}


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """The declaration of one quantity."""

    name: str = ""
    """Of the record's field."""
    is_counter: bool
    """It only grows: it is summed over attempts, and its difference over a window is what happened in that."""
    metric: str
    """Its name, as Prometheus stores it; "": it is not exported."""
    help: str
    """Of the metric; "": another quantity or the catalogue has that (several share one metric)."""
    labels: Mapping[str, str]
    """Of the metric, besides those of all quantities of the record (the rank)."""
    word: int
    """Index of its first word in the segment."""
    keys: tuple[str, ...] = ()
    """A mapping with these keys, one word for each."""
    key_label: str = ""
    """The label of the metric whose values are the keys."""
    buckets: int = 0
    """A histogram: a tuple of counts per bucket, one word for each."""
    total: str = ""
    """The name of the quantity that is the histogram's sum."""
    known_by: str = ""
    """It is known only while the quantity of this name is not 0; "": always."""
    divisor: float | None = None
    """What to divide its value by to get the metric's; None: they are the same."""

    @property
    def width(self) -> int:
        """How many words it takes."""
        return len(self.keys) or self.buckets or 1

    def words_of(self, value: Any) -> Sequence[int]:
        """Return a value of the record's field as words."""
        if self.keys:
            return tuple(value.values())
        return value if self.buckets else (value,)

    def value_of(self, words: Sequence[int]) -> Any:
        """Return the value of the record's field, given its words."""
        if self.keys:
            return dict(zip(self.keys, words, strict=True))
        return tuple(words) if self.buckets else words[0]

    def shown(self, value: int) -> float:
        """Return a value as its metric shows it."""
        return value if self.divisor is None else value / self.divisor


class _Declared:
    """The quantities of a record; those of one word apart, because all of them are read many times a second."""

    def __init__(self, quantities: Sequence[Quantity]) -> None:
        self.all = tuple(quantities)
        self.plain = tuple((each.name, each.word) for each in quantities if each.width == 1)
        self.plain_counters = tuple(each.name for each in quantities if each.width == 1 and each.is_counter)
        self.wide = tuple(each for each in quantities if each.width > 1)


def _declare(metric: str, **known: Any) -> Any:
    return field(metadata={_KEY: Quantity(metric=metric and _PREFIX + metric, **known)})


def counter(metric: str = "", help: str = "", *, word: int = _ANYWHERE, **labels: str) -> Any:  # noqa: A002
    """Declare a counter: the field only grows in one attempt.

    Args:
        metric: the name of its metric without `gpulaunch_`; "": it is not exported.
        help: of the metric; "" if another declaration of that metric has it.
        word: where it lies in the segment, if that matters (several words are written together, say).
        labels: of the metric.
    """
    return _declare(metric, is_counter=True, help=help, labels=labels, word=word)


def gauge(metric: str = "", help: str = "", *, known_by: str = "", **labels: str) -> Any:  # noqa: A002
    """Declare a gauge: the newest value counts. `known_by`: the quantity that is 0 while this one is unknown."""
    return _declare(metric, is_counter=False, help=help, labels=labels, word=_ANYWHERE, known_by=known_by)


def counters(metric: str, help: str, *, word: int, **keys: tuple[str, ...]) -> Any:  # noqa: A002
    """Declare a mapping of counters, written to the words from `word` on; `keys`: the one label, and its values."""
    ((label, values),) = keys.items()
    return _declare(metric, is_counter=True, help=help, labels={}, word=word, keys=values, key_label=label)


def histogram(metric: str, help: str, *, word: int, buckets: int, total: str) -> Any:  # noqa: A002
    """Declare a histogram: counts per bucket, not cumulative. `total`: the field with the sum of what they count."""
    return _declare(metric, is_counter=True, help=help, labels={}, word=word, buckets=buckets, total=total)


_next_word = QUANTITIES_FIRST


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(counter, gauge, counters, histogram))
def quantities(cls: type[T]) -> type[T]:
    """Make the class a record of quantities; those without a word get the next free one of the segment."""
    global _next_word
    made, _next_word = _record(cls, _next_word)
    assert _next_word <= QUANTITIES_END, "the segment has no word left: make room in channel.layout"
    return made


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(counter, gauge, counters, histogram))
def table_row(cls: type[T]) -> type[T]:
    """Make the class the record of a row of a table in the segment: its words are counted from the row's first."""
    return _record(cls, 0)[0]


def _record(cls: type[T], next_word: int) -> tuple[type[T], int]:
    made = dataclass(frozen=True, kw_only=True)(cls)
    found: list[Quantity] = []
    for each in dataclasses.fields(made):  # type: ignore[arg-type]
        quantity: Quantity = each.metadata[_KEY]
        word = quantity.word
        if word == _ANYWHERE:
            word, next_word = next_word, next_word + quantity.width
        divisor = next((by for suffix, by in _DIVISORS.items() if each.name.endswith(suffix)), None)
        found.append(dataclasses.replace(quantity, name=each.name, word=word, divisor=divisor))
        setattr(made, each.name, word)
    setattr(made, _ATTRIBUTE, _Declared(found))
    return made, next_word


def quantities_of(record: object) -> tuple[Quantity, ...]:
    """Return the declarations of a record or its class, in their order."""
    return _declared(record).all


def _declared(record: object) -> _Declared:
    found: _Declared = getattr(record, _ATTRIBUTE)
    return found


def fields_of(record: type, words: Sequence[int], *, first: int = 0) -> dict[str, Any]:
    """Return the fields of a record, given the words of the segment; `first`: the first word of its row in a table."""
    declared = _declared(record)
    found: dict[str, Any] = {name: words[first + word] for name, word in declared.plain}
    for each in declared.wide:
        found[each.name] = each.value_of(words[each.word : each.word + each.width])
    return found


def read(record: type[T], words: Sequence[int], *, first: int = 0) -> T:
    """Return a record, given the words of the segment; `first`: the first word of its row in a table."""
    return record(**fields_of(record, words, first=first))


def store(words: memoryview, record: object) -> None:
    """Write the quantities of a record to the words of the segment."""
    for each in quantities_of(record):
        for word, value in enumerate(each.words_of(getattr(record, each.name)), each.word):
            words[word] = value


def counts(record: object) -> list[int]:
    """Return the values of a record's counters, in the order in which `with_counts` takes them."""
    declared = _declared(record)
    found: list[int] = [getattr(record, name) for name in declared.plain_counters]
    for each in declared.wide:  # all of them are counters
        found += each.words_of(getattr(record, each.name))
    return found


def with_counts(record: R, rest: Iterator[int]) -> R:
    """Return the record with other values of its counters: the next ones of `rest`."""
    declared = _declared(record)
    changed: dict[str, Any] = {name: next(rest) for name in declared.plain_counters}
    for each in declared.wide:
        changed[each.name] = each.value_of([next(rest) for _ in range(each.width)])
    return dataclasses.replace(record, **changed)


def difference(new: R, old: R | None) -> R:
    """Return what happened between two records: counters are subtracted, gauges are those of the later one.

    None for the earlier one: its counters were 0.
    """
    if old is None:
        return new
    return with_counts(new, map(sub, counts(new), counts(old)))


def layout_id(records: Sequence[type]) -> int:
    """Return a number of 32 bits that is another one if any word of these records has another place or meaning."""
    text = ";".join(
        f"{record.__name__}.{each.name}={each.word}+{each.width}{each.keys}"
        for record in records
        for each in quantities_of(record)
    )
    return zlib.crc32(text.encode())
