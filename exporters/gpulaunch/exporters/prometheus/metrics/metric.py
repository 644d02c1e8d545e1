"""The types that make up a row of the metric catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Kind(Enum):
    """The type of a metric."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, kw_only=True)
class Label:
    """A label and its allowed values; none listed: any value, for an index or a description."""

    name: str
    values: frozenset[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One row of the catalogue."""

    name: str
    """As Prometheus stores it, without the `_bucket`, `_sum` and `_count` of a histogram."""
    kind: Kind
    help: str
    unit: str = ""
    labels: tuple[Label, ...] = ()


def one_of(name: str, *values: str) -> Label:
    """Return a label with a closed set of values."""
    return Label(name=name, values=frozenset(values))


RANK: Final = Label(name="rank")
GPU: Final = Label(name="gpu")
