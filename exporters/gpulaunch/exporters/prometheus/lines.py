"""A state as text: a line for each sample, below the head of its family.

Both formats have the same lines and differ in the heads, so a state is written once for both. A rank has more than a
hundred lines, of which a step changes some: a line is kept from one page to the next, and written anew when its value
has changed. The library's writers, which make every line of every page from nothing and, for OpenMetrics, look at each
letter of its name, take several times as long. The tests hold these pages against theirs, byte for byte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeAlias

from prometheus_client.utils import floatToGoString

from gpulaunch.exporters.prometheus.catalogue import CATALOGUE
from gpulaunch.exporters.prometheus.families import UnknownValueError, check_histogram, metric_of
from gpulaunch.exporters.prometheus.metrics.metric import Kind, Metric

_MOST_TOLD: Final = 32
"""A later probe may have a name for each of many things: that there are more is not told."""
_KEPT: Final = 64
"""When a family knows more than twice the lines that it has now, and so many more, it forgets them all."""


_Line: TypeAlias = tuple[object, str, tuple[str, ...], Sequence[float]]
"""A sample, or a histogram: the value that was written last, its text, everything of each line but its number, and the
bounds of the buckets. A plain tuple, since of those the garbage collector soon looks at none any more: there are many.
"""
_NO_BOUNDS: Final = ()
_AS_GO: Final[Callable[[float], str]] = floatToGoString


class _Family:
    """The lines of one metric: those that are known, and those of the page that is being written."""

    __slots__ = ("known", "labels", "metric", "texts")

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.labels = tuple(label.name for label in metric.labels)
        self.known: dict[tuple[str, ...], _Line] = {}
        self.texts: list[str] = []


class Lines:
    """Takes the values of one state after another, and gives the lines of each. For one thread at a time."""

    def __init__(self, *, on_unknown: Callable[[str], None] | None = None) -> None:
        """`on_unknown` hears once of each value of a closed label that the catalogue does not know, and what has it is
        left out: a later probe, or a driver's new reason for a slow clock, must not cost all the others. None: refused.
        """
        self._families: dict[str, _Family] = {}
        self._on_unknown = on_unknown
        self._told: set[str] = set()

    def begin(self) -> None:
        """Begin with the next state."""
        for family in self._families.values():
            family.texts = []

    def put(self, name: str, value: float | None, /, **labels: str) -> None:
        """Add one value; None is what is not known, and adds nothing."""
        if value is None:
            return
        key = tuple(labels.values())
        family = self._families.get(name)
        if family is None or family.labels != tuple(labels) or (line := family.known.get(key)) is None:
            family = self._family(name, labels)
            if family is None:
                return
            line = (None, "", (_prefix(name, labels),), _NO_BOUNDS)
        known, text, prefixes, _ = line
        if known != value:
            text = f"{prefixes[0]}{_number(value)}\n"
            family.known[key] = (value, text, prefixes, _NO_BOUNDS)
        family.texts.append(text)

    def put_histogram(
        self, name: str, bounds: Sequence[float], counts: Sequence[int], total: float, /, **labels: str
    ) -> None:
        """Add one histogram; `counts` are per bucket and one longer than the bounds."""
        family = self._family(name, labels)
        if family is None:
            return
        check_histogram(family.metric, bounds, counts)
        key = tuple(labels.values())
        line = family.known.get(key)
        if line is None or line[-1] != bounds:
            line = (None, "", _prefixes(name, labels, bounds), bounds)
        known, text, prefixes, _ = line
        if known != (value := (*counts, total)):
            seen = tuple(accumulate(counts))
            numbers = map(_number, (*seen, seen[-1], total))
            text = "".join([f"{prefix}{number}\n" for prefix, number in zip(prefixes, numbers, strict=True)])
            family.known[key] = (value, text, prefixes, bounds)
        family.texts.append(text)

    def end(self) -> Mapping[str, str]:
        """Give the lines of each metric that has some, by its name and in the order of the catalogue."""
        for family in self._families.values():
            if len(family.known) > 2 * len(family.texts) + _KEPT:
                family.known.clear()  # mostly of ranks that are gone
        return {
            metric.name: "".join(found.texts)
            for metric in CATALOGUE
            if (found := self._families.get(metric.name)) is not None and found.texts
        }

    def _family(self, name: str, labels: Mapping[str, str]) -> _Family | None:
        try:
            metric = metric_of(name, labels)
        except UnknownValueError as unknown:
            if self._on_unknown is None:
                raise
            if str(unknown) not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(str(unknown))
                self._on_unknown(str(unknown))
            return None
        family = self._families.get(metric.name)
        if family is None:
            family = self._families[metric.name] = _Family(metric)
        return family


def page_of(lines: Mapping[str, str], *, openmetrics: bool) -> bytes:
    """Give a whole page of what `Lines` gave."""
    heads = _heads(openmetrics)
    parts = [part for name, text in lines.items() for part in (heads[name], text)]
    if openmetrics:
        parts.append("# EOF\n")
    # A name that is not UTF-8 came as half characters: it is shown with question marks, the rest as it is.
    return "".join(parts).encode(errors="replace")


@functools.cache
def _heads(openmetrics: bool) -> Mapping[str, str]:
    return {metric.name: (_openmetrics_head if openmetrics else _text_head)(metric) for metric in CATALOGUE}


def _text_head(metric: Metric) -> str:
    kind = Kind.GAUGE if metric.kind is Kind.INFO else metric.kind
    told = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {metric.name} {told}\n# TYPE {metric.name} {kind.value}\n"


def _openmetrics_head(metric: Metric) -> str:
    # There a family is called without the suffix of its samples.
    suffix = {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(metric.kind, "")
    name = metric.name.removesuffix(suffix)
    unit = f"# UNIT {name} {metric.unit}\n" if metric.unit else ""
    return f"# HELP {name} {_escaped(metric.help)}\n# TYPE {name} {metric.kind.value}\n{unit}"


def _prefixes(name: str, labels: Mapping[str, str], bounds: Sequence[float]) -> tuple[str, ...]:
    buckets = (_prefix(f"{name}_bucket", {**labels, "le": bound}) for bound in (*map(_bound, bounds), "+Inf"))
    return (*buckets, _prefix(f"{name}_count", labels), _prefix(f"{name}_sum", labels))


def _bound(bound: float) -> str:
    return repr(float(bound))


def _prefix(name: str, labels: Mapping[str, str]) -> str:
    told = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{told}}} " if told else f"{name} "


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    value = float(value)
    return repr(value) if -1e6 < value < 1e6 else _AS_GO(value)
