"""The families of the catalogue as OpenTelemetry's data points. Pure; the library writes the bytes.

Names stay what they are in the catalogue, so that a metric is found by one name everywhere; a backend that derives
Prometheus names from OTLP (unit and `_total` as suffixes) comes to the same ones. What is a counter there is a
monotonic cumulative sum here, an info is a gauge of 1, a label is an attribute.

The start of a sum is left 0, which OTLP reads as unknown: counters go on over restarts of the sidecar, and a start that
moved with it would say that they began again.
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
"""Units of the catalogue in UCUM, which OTLP asks for."""
_ROWS: Final[Mapping[str, Row]] = {row.name: row for row in CATALOGUE}
_START_UNKNOWN: Final = 0


def resource_of(*, run: str, token: str, name: str, node: str, version: str) -> Resource:
    """Say who sends: the attributes that OpenTelemetry's conventions have, and ours for the run.

    What the user has put into OTEL_RESOURCE_ATTRIBUTES is added by the library.
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
    """Give families (of `gpulaunch.exporters.prometheus.values`) as one message's worth of metrics."""
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
    # prometheus_client names a family without the suffix that OpenMetrics puts on its samples.
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
    """One point for each set of labels; Prometheus' buckets count all that is below, OTLP's what is between."""
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
            # Not known; in the protocol both may be left out, in the library's types they may not.
            min=cast("float", None),
            max=cast("float", None),
        )
        for key, below in buckets.items()
    ]


def _between(below: Sequence[int]) -> list[int]:
    return [count - before for before, count in zip((0, *below), below, strict=False)]
