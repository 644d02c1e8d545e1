"""Converts the catalogue's families to OpenTelemetry data points. Pure; the library serializes them.

Names are the catalogue's, so that a metric has one name everywhere; a backend that derives Prometheus names from OTLP
(unit and `_total` as suffixes) gets the same ones. A counter becomes a monotonic cumulative sum, an info a gauge of 1,
a label an attribute.

The start time of a sum is 0, which means unknown in OTLP: counters continue across restarts of the sidecar, and a start
time that moved with it would signal a counter reset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, cast

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from gpulaunch.exporters.prometheus.catalogue import CATALOGUE
from gpulaunch.exporters.prometheus.families import as_utf8
from gpulaunch.exporters.prometheus.metrics.metric import Kind
from gpulaunch.exporters.prometheus.metrics.metric import Metric as Row

UNITS: Final[Mapping[str, str]] = {
    "": "",
    "seconds": "s",
    "bytes": "By",
    "ratio": "1",
    "hertz": "Hz",
    "watts": "W",
    "joules": "J",
    "celsius": "Cel",
}
"""Units of the catalogue in UCUM, as OTLP requires."""
_ROWS: Final[Mapping[str, Row]] = {row.name: row for row in CATALOGUE}
_START_UNKNOWN: Final = 0


def resource_of(*, run: str, token: str, name: str, node: str, version: str) -> Resource:
    """Return the sender's resource: attributes of the OpenTelemetry conventions, and our own for the run.

    The library adds the user's OTEL_RESOURCE_ATTRIBUTES.
    """
    said = {
        "service.name": "gpulaunch",
        "service.version": version,
        "service.instance.id": f"{node}/{token}",
        "host.name": node,
        "gpulaunch.run": run,
        "gpulaunch.name": name,
    }
    return Resource.create({attribute: as_utf8(text) for attribute, text in said.items()})


def data_of(families: Iterable[Family], resource: Resource, *, taken_wall_ns: int, version: str) -> MetricsData:
    """Return families (of `gpulaunch.exporters.prometheus.values`) as the metrics of one message."""
    metrics = [_metric(family, taken_wall_ns) for family in families]
    scope = InstrumentationScope("gpulaunch", version)
    return MetricsData(
        resource_metrics=[
            ResourceMetrics(
                resource=resource,
                scope_metrics=[ScopeMetrics(scope=scope, metrics=metrics, schema_url="")],
                schema_url="",
            )
        ]
    )


def _metric(family: Family, taken_wall_ns: int) -> Metric:
    samples = family.samples
    row = _ROWS[_name_of(family)]
    data: Sum | Gauge | Histogram
    match row.kind:
        case Kind.COUNTER:
            data = Sum(
                data_points=_numbers(samples, taken_wall_ns),
                aggregation_temporality=AggregationTemporality.CUMULATIVE,
                is_monotonic=True,
            )
        case Kind.HISTOGRAM:
            data = Histogram(
                data_points=_histograms(row.name, samples, taken_wall_ns),
                aggregation_temporality=AggregationTemporality.CUMULATIVE,
            )
        case Kind.GAUGE | Kind.INFO:
            data = Gauge(data_points=_numbers(samples, taken_wall_ns))
    return Metric(name=row.name, description=row.help, unit=UNITS[row.unit], data=data)


def _name_of(family: Family) -> str:
    # prometheus_client names a family without the OpenMetrics suffix of its samples.
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    return f"{family.name}{suffix}"


def _numbers(samples: Iterable[Sample], taken_wall_ns: int) -> list[NumberDataPoint]:
    return [
        NumberDataPoint(
            attributes=dict(sample.labels),
            start_time_unix_nano=_START_UNKNOWN,
            time_unix_nano=taken_wall_ns,
            value=float(sample.value),
        )
        for sample in samples
    ]


def _histograms(name: str, samples: Iterable[Sample], taken_wall_ns: int) -> list[HistogramDataPoint]:
    """Return one point per label set; Prometheus buckets are cumulative, OTLP buckets are not."""
    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in samples:
        key = tuple((label, value) for label, value in sample.labels.items() if label != "le")
        if sample.name == f"{name}_bucket":
            buckets.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name == f"{name}_sum":
            sums[key] = sample.value
    return [
        HistogramDataPoint(
            attributes=dict(key),
            start_time_unix_nano=_START_UNKNOWN,
            time_unix_nano=taken_wall_ns,
            count=int(below[-1][1]),
            sum=float(sums[key]),
            bucket_counts=_between([int(count) for _, count in below]),
            explicit_bounds=[bound for bound, _ in below[:-1]],
            # Unknown; optional in the protocol, but required by the library's types.
            min=cast("float", None),
            max=cast("float", None),
        )
        for key, below in buckets.items()
    ]


def _between(below: Sequence[int]) -> list[int]:
    return [count - before for before, count in zip((0, *below), below, strict=False)]
