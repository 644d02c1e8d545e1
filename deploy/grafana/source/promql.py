"""What a metric is asked, checked against the catalogue of metrics while it is put together.

A metric or a label that is not in the catalogue, a label value that its metric cannot have, a rate of a gauge, an
aggregation by a label that is not there: each is a `QueryError`.

Every selector keeps to the variables of the dashboards: `$node`, `$rank` where there are ranks, and `$run`. The next
job of a machine often has the port of the one before, so the run is asked for twice. A join with gpulaunch_run_info,
the one metric that has the run as a label, drops what an address serves while another run is there. The label `run` of
the target drops what another run has left in the window of a rate. Targets without that label, which `run=~"a|"` lets
pass, have both in the window.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from source.expr import BASE, Expr, QueryError, Unit, grouped, known, product

from gpulaunch.exporters.prometheus.catalogue import CATALOGUE, Metric
from gpulaunch.exporters.prometheus.metrics.metric import Kind

__all__ = ["RANGE", "gauge", "histogram_mean", "increase", "info", "quantile", "rate", "seconds_counted"]

METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for metric in CATALOGUE}
TARGET_LABELS: Final = frozenset({"job", "instance"})
"""What Prometheus adds to everything that it scrapes."""
WINDOW: Final = "$__rate_interval"
RANGE: Final = "$__range"


def rate(name: str, /, **labels: str | tuple[str, ...]) -> Expr:
    """By how much a counter grows in a second, lately."""
    return _of_counter("rate", name, WINDOW, labels)


def increase(name: str, /, **labels: str | tuple[str, ...]) -> Expr:
    """By how much a counter has grown in the time that is looked at; of the run, also where it is over by now."""
    return _of_counter("increase", name, RANGE, labels)


def gauge(name: str, /, **labels: str | tuple[str, ...]) -> Expr:
    """What a gauge shows, or what a counter has come to in this run."""
    metric = _metric(name)
    if metric.kind not in (Kind.GAUGE, Kind.COUNTER):
        raise QueryError(f"{name} is a {metric.kind.value}")
    return _here(_selector(metric, metric.name, labels), _unit(metric), _labels(metric))


def info(name: str, /) -> Expr:
    """The facts of an info metric: its value is always 1."""
    metric = _metric(name)
    if metric.kind is not Kind.INFO:
        raise QueryError(f"{name} is a {metric.kind.value}")
    return _here(_selector(metric, metric.name, {}), BASE[""], _labels(metric))


def quantile(share: float, name: str, /, *by: str) -> Expr:
    """A quantile of what a histogram has counted lately."""
    metric = _histogram(name)
    known(by, _labels(metric))
    within = _here(f"rate({_selector(metric, f'{name}_bucket', {})}[{WINDOW}])", (), frozenset())
    text = f"histogram_quantile({share:g}, sum by ({', '.join((*by, 'le'))}) ({within.text}))"
    return Expr(text=text, unit=_unit(metric), labels=frozenset(by))


def histogram_mean(name: str, /, *by: str) -> Expr:
    """The mean of what a histogram has counted lately; nothing where that is nothing."""
    metric = _histogram(name)
    known(by, _labels(metric))
    parts: list[str] = []
    for end in ("sum", "count"):
        within = _here(f"rate({_selector(metric, f'{name}_{end}', {})}[{WINDOW}])", (), frozenset())
        parts.append(f"sum{grouped(by)} ({within.text})")
    return Expr(text=f"{parts[0]} / ({parts[1]} > 0)", unit=_unit(metric), labels=frozenset(by), compound=True)


def seconds_counted(name: str, /, *by: str) -> Expr:
    """The seconds that a histogram has counted in a second, lately: a share of the time."""
    metric = _histogram(name)
    known(by, _labels(metric))
    within = _here(f"rate({_selector(metric, f'{name}_sum', {})}[{WINDOW}])", (), frozenset())
    return Expr(text=f"sum{grouped(by)} ({within.text})", unit=(), labels=frozenset(by))


def _metric(name: str) -> Metric:
    try:
        return METRICS[name]
    except KeyError:
        raise QueryError(f"{name} is not in the catalogue") from None


def _unit(metric: Metric) -> Unit:
    return BASE[metric.unit]


def _histogram(name: str) -> Metric:
    metric = _metric(name)
    if metric.kind is not Kind.HISTOGRAM:
        raise QueryError(f"{name} is a {metric.kind.value}, and no histogram")
    return metric


def _labels(metric: Metric) -> frozenset[str]:
    return frozenset(label.name for label in metric.labels) | TARGET_LABELS


def _of_counter(function: str, name: str, window: str, labels: Mapping[str, str | tuple[str, ...]]) -> Expr:
    metric = _metric(name)
    if metric.kind is not Kind.COUNTER:
        raise QueryError(f"{function}() of {name}, which is a {metric.kind.value}")
    unit = _unit(metric)
    if function == "rate":
        unit = product(unit, BASE["seconds"], -1)
    return _here(f"{function}({_selector(metric, name, labels)}[{window}])", unit, _labels(metric), window)


def _selector(metric: Metric, series: str, labels: Mapping[str, str | tuple[str, ...]]) -> str:
    values_of = {label.name: label.values for label in metric.labels}
    matchers = ['instance=~"$node"', 'run=~"$run|"']
    # What the sidecar takes is no rank's, and there whichever rank is chosen.
    if "rank" in values_of and "rank" not in labels and labels.get("where") != "sidecar":
        matchers.append('rank=~"$rank"')
    for label, wanted in labels.items():
        values = wanted if isinstance(wanted, tuple) else (wanted,)
        if label not in values_of:
            raise QueryError(f"{metric.name} has no label {label}")
        closed = values_of[label]
        unknown = [value for value in values if closed is not None and value not in closed]
        if unknown:
            raise QueryError(f"{metric.name}: {label} is never {unknown[0]}")
        if any(re.fullmatch(r"[\w-]*", value) is None for value in values):
            raise QueryError(f"{metric.name}: {values} cannot be matched as they are")
        matchers.append(f'{label}="{values[0]}"' if len(values) == 1 else f'{label}=~"{"|".join(values)}"')
    return f"{series}{{{', '.join(matchers)}}}"


def _here(text: str, unit: Unit, labels: frozenset[str], window: str = "") -> Expr:
    """Keep what the run has measured that is looked at."""
    run = 'gpulaunch_run_info{run=~"$run"}'
    if window == RANGE:
        run = f"last_over_time({run}[{RANGE}])"
    return Expr(text=f"({text} and on (job, instance) {run})", unit=unit, labels=labels)
