"""Metric families under construction: every name and label is checked against the catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from gpulaunch.exporters.prometheus.catalogue import CATALOGUE
from gpulaunch.exporters.prometheus.metrics.metric import Kind, Metric

_BY_NAME = {metric.name: metric for metric in CATALOGUE}


class CatalogueError(Exception):
    """A value was offered under a name or a label that the catalogue does not have."""


class UnknownValueError(CatalogueError):
    """The value of a closed label is not in the catalogue, e.g. from a newer probe or driver; name and labels are."""


def as_utf8(text: str) -> str:
    """Return the text as valid UTF-8: lone surrogates, from names that are not UTF-8, become question marks."""
    return text.encode(errors="replace").decode()


class Sink(Protocol):
    """Takes the values of a state, one by one."""

    def put(self, name: str, value: float | None, /, **labels: str) -> None:
        """Add one sample; None means unknown, and adds nothing."""
        ...

    def put_histogram(
        self, name: str, bounds: Sequence[float], counts: Sequence[int], total: float, /, **labels: str
    ) -> None:
        """Add one histogram; `counts` are per bucket and one longer than the bounds."""
        ...


def metric_of(name: str, labels: Mapping[str, str]) -> Metric:
    """Return the catalogue row of a sample.

    Raises:
        CatalogueError: there is no such row, or it has other labels (a bug in the exporter).
        UnknownValueError: a label value is not in the row.
    """
    metric = _BY_NAME.get(name)
    if metric is None:
        raise CatalogueError(f"{name} is not in the catalogue")
    if tuple(labels) != tuple(label.name for label in metric.labels):
        raise CatalogueError(f"{name} has the labels {[label.name for label in metric.labels]}, not {list(labels)}")
    for label in metric.labels:
        if label.values is not None and labels[label.name] not in label.values:
            raise UnknownValueError(f"{name}: {label.name}={labels[label.name]!r} is not in the catalogue")
    return metric


def check_histogram(metric: Metric, bounds: Sequence[float], counts: Sequence[int]) -> None:
    """Raise CatalogueError if the metric is not a histogram or the number of buckets differs."""
    if metric.kind is not Kind.HISTOGRAM or len(counts) != len(bounds) + 1:
        raise CatalogueError(f"{metric.name} is not a histogram of {len(counts)} buckets")


class Families:
    """Metric families under construction; returned in catalogue order, empty ones left out."""

    def __init__(self, *, refuse: bool = True) -> None:
        """`refuse`: raise UnknownValueError for an unknown label value; otherwise leave its sample out."""
        self._refuse = refuse
        self._families: dict[str, Family] = {}

    def put(self, name: str, value: float | None, /, **labels: str) -> None:
        """Add one sample; None means unknown, and adds nothing."""
        if value is not None and (metric := self._metric_of(name, labels)) is not None:
            self._family(metric).add_sample(name, {label: as_utf8(text) for label, text in labels.items()}, value)

    def put_histogram(
        self, name: str, bounds: Sequence[float], counts: Sequence[int], total: float, /, **labels: str
    ) -> None:
        """Add one histogram; `counts` are per bucket and one longer than the bounds."""
        metric = self._metric_of(name, labels)
        if metric is None:
            return
        check_histogram(metric, bounds, counts)
        family = self._family(metric)
        assert isinstance(family, HistogramMetricFamily), "its kind has been looked at"
        seen = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*(repr(float(bound)) for bound in bounds), "+Inf"), counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family.add_metric(list(map(as_utf8, labels.values())), buckets, total)

    def collect(self) -> Iterable[Family]:
        """Return the families (this makes it a collector of prometheus_client)."""
        return [self._families[metric.name] for metric in CATALOGUE if metric.name in self._families]

    def _metric_of(self, name: str, labels: Mapping[str, str]) -> Metric | None:
        try:
            return metric_of(name, labels)
        except UnknownValueError:
            if self._refuse:
                raise
            return None

    def _family(self, metric: Metric) -> Family:
        family = self._families.get(metric.name)
        if family is None:
            family = self._families[metric.name] = _new_family(metric)
        return family


def _new_family(metric: Metric) -> Family:
    # OpenMetrics names a family without the suffix of its samples; the text format adds it back.
    match metric.kind:
        case Kind.COUNTER:
            return Family(metric.name.removesuffix("_total"), metric.help, "counter", metric.unit)
        case Kind.INFO:
            return Family(metric.name.removesuffix("_info"), metric.help, "info")
        case Kind.GAUGE:
            return Family(metric.name, metric.help, "gauge", metric.unit)
        case Kind.HISTOGRAM:
            labels = [label.name for label in metric.labels]
            return HistogramMetricFamily(metric.name, metric.help, labels=labels, unit=metric.unit)
