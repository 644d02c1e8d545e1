"""Renders a state as exposition text: a line for each sample, below the head of its family.

Both formats have the same lines and differ in the heads, so a state is rendered once for both. A rank has more than a
hundred lines, and a step changes only some: a line is cached between pages and rendered again when its value has
changed. The writers of prometheus_client, which render every line of every page anew and, for OpenMetrics, check each
character of its name, take several times as long. The tests compare these pages with theirs, byte for byte.
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
"""Limit of reported unknown values: a newer probe may have very many; the rest is not reported."""
_KEPT: Final = 64
"""A family clears its cache when it holds more than twice its current lines plus this many."""


_Line: TypeAlias = tuple[object, str, tuple[str, ...], Sequence[float]]
"""A sample or a histogram: the last rendered value, its text, each line without its number, and the bucket bounds. A
plain tuple, because the garbage collector soon stops tracking those, and there are many.
"""
_NO_BOUNDS: Final = ()
_AS_GO: Final[Callable[[float], str]] = floatToGoString


class _Family:
    """The lines of one metric: the cached ones, and those of the page being rendered."""

    __slots__ = ("known", "labels", "metric", "texts")

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.labels = tuple(label.name for label in metric.labels)
        self.known: dict[tuple[str, ...], _Line] = {}
        self.texts: list[str] = []


class Lines:
    """Takes the values of successive states and returns the lines of each. For one thread at a time."""

    def __init__(self, *, on_unknown: Callable[[str], None] | None = None) -> None:
        """`on_unknown` is called once for each value of a closed label that is not in the catalogue, and its sample is
        left out: a newer probe, or a driver's new throttle reason, must not cost all other samples. None: raise.
        """
        self._families: dict[str, _Family] = {}
        self._on_unknown = on_unknown
        self._told: set[str] = set()

    def begin(self) -> None:
        """Begin the next state."""
        for family in self._families.values():
            family.texts = []

    def put(self, name: str, value: float | None, /, **labels: str) -> None:
        """Add one sample; None means unknown, and adds nothing."""
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
        """Return the lines of each metric that has any, by name and in catalogue order."""
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
    """Return a whole page made of the lines from `Lines`."""
    heads = _heads(openmetrics)
    parts = [part for name, text in lines.items() for part in (heads[name], text)]
    if openmetrics:
        parts.append("# EOF\n")
    # A name that is not UTF-8 has lone surrogates: they become question marks, the rest stays as it is.
    return "".join(parts).encode(errors="replace")


@functools.cache
def _heads(openmetrics: bool) -> Mapping[str, str]:
    return {metric.name: (_openmetrics_head if openmetrics else _text_head)(metric) for metric in CATALOGUE}


def _text_head(metric: Metric) -> str:
    kind = Kind.GAUGE if metric.kind is Kind.INFO else metric.kind
    told = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {metric.name} {told}\n# TYPE {metric.name} {kind.value}\n"


def _openmetrics_head(metric: Metric) -> str:
    # OpenMetrics names a family without the suffix of its samples.
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
