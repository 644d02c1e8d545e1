"""Reads expressions of the dashboards by themselves, and says what is wrong with them. Not a test module.

It knows nothing of the generator: what that has let pass by mistake is to be seen here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpulaunch.exporters.prometheus.catalogue import CATALOGUE
from gpulaunch.exporters.prometheus.metrics.metric import Kind

GRAFANA = Path(__file__).parents[2] / "deploy/grafana"
METRICS = {metric.name: metric for metric in CATALOGUE}
TARGET = frozenset({"job", "instance"})
DISCOVERED = "run"
"""A label that targets may have; the selectors let those pass that have none."""
GIVEN_BY_GRAFANA = {"__rate_interval", "__range"}
GPU_ROW = "needs a GPU"
OF_HISTOGRAMS = ("_bucket", "_sum", "_count")
_SELECTOR = re.compile(r"(?P<name>[a-z_]+)\{(?P<matchers>[^}]*)\}(?P<window>\[[^]]*\])?")
_MATCHER = re.compile(r'(?P<label>\w+)(?P<sign>=~|=)"(?P<value>[^"]*)"')
_GROUPED = re.compile(r"\bby \((?P<by>[^)]*)\) \(")
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


@dataclass(frozen=True, kw_only=True)
class Query:
    """One query of one panel."""

    dashboard: str
    panel: str
    kind: str
    unit: str
    expr: str
    legend: str
    table: bool
    instant: bool
    needs_gpu: bool
    signed: bool
    """It may be below zero: its axis does not begin there."""
    columns: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dashboard} / {self.panel} / {self.legend or 'table'}"


def dashboards() -> dict[str, dict[str, Any]]:
    """By the names of their files."""
    return {path.name: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}


def panels(dashboard: dict[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Every panel that is no row, and whether its row says that it needs a GPU."""
    needs_gpu = False
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            needs_gpu = GPU_ROW in panel["title"]
        else:
            yield panel, needs_gpu


def queries() -> list[Query]:
    found: list[Query] = []
    for name, dashboard in dashboards().items():
        for panel, needs_gpu in panels(dashboard):
            for target in panel.get("targets", ()):
                transformations = panel.get("transformations", ())
                columns = [each["options"]["renameByName"] for each in transformations if each["id"] == "organize"]
                found.append(
                    Query(
                        dashboard=name.removeprefix("gpulaunch-").removesuffix(".json"),
                        panel=panel["title"],
                        kind=panel["type"],
                        unit=panel["fieldConfig"]["defaults"]["unit"],
                        expr=target["expr"],
                        legend=target["legendFormat"],
                        table=target["format"] == "table",
                        instant=target["instant"],
                        needs_gpu=needs_gpu,
                        signed="min" not in panel["fieldConfig"]["defaults"],
                        columns=tuple(columns[0]) if columns else (),
                    )
                )
    return found


def variables(text: str) -> set[str]:
    """The names that Grafana would put something in the place of."""
    return set(_VARIABLE.findall(text))


def metrics_of(expr: str) -> set[str]:
    """The metrics of the catalogue that an expression asks for."""
    return {_base(match["name"]) or match["name"] for match in _SELECTOR.finditer(expr)}


def faults(expr: str) -> list[str]:
    """What is wrong with an expression, by the catalogue."""
    found: list[str] = []
    loose = re.findall(r"gpulaunch_\w+", _SELECTOR.sub("", expr))
    found += [f"{name} without a selector" for name in loose]
    for match in _SELECTOR.finditer(expr):
        found += _of_selector(expr, match)
    for match in _GROUPED.finditer(expr):
        inside = expr[match.end() : _closing(expr, match.end())]
        there = _labels_within(inside)
        found += [f"by ({label}), which is nowhere inside" for label in match["by"].split(", ") if label not in there]
    return found


def _of_selector(expr: str, match: re.Match[str]) -> Iterator[str]:
    name = match["name"]
    base = _base(name)
    if base is None:
        yield f"{name} is not in the catalogue"
        return
    metric = METRICS[base]
    yield from _of_function(expr[: match.start()], metric.kind, name, windowed=match["window"] is not None)
    closed = {label.name: label.values for label in metric.labels}
    matchers = _MATCHER.findall(match["matchers"])
    if ", ".join(f'{label}{sign}"{value}"' for label, sign, value in matchers) != match["matchers"]:
        yield f"cannot read {match['matchers']}"
    for label, sign, value in matchers:
        if label == DISCOVERED and label not in closed:
            yield from [] if (sign, value) == ("=~", "$run|") else [f"{name} of targets with {label}{sign}{value}"]
        elif label not in closed and label not in TARGET:
            yield f"{name} has no label {label}"
        elif label in closed and "$" not in value:
            values = closed[label]
            wanted = value.split("|") if sign == "=~" else [value]
            yield from (f"{name}: {label} is never {each}" for each in wanted if values and each not in values)
    if match["matchers"] == 'run=~"$run"' and name == "gpulaunch_run_info":
        return  # what everything else is joined with
    named = {label for label, _, _ in matchers}
    wanted = {"instance", DISCOVERED, *({"rank"} & closed.keys())}
    if ("where", "=", "sidecar") in matchers:  # which is no rank
        yield from [f"{name} of a rank of a sidecar"] if "rank" in named else []
        wanted.discard("rank")
    yield from (f"{name} without {label}" for label in sorted(wanted - named))


def _of_function(before: str, kind: Kind, name: str, *, windowed: bool) -> Iterator[str]:
    called = re.search(r"(\w+)\($", before)
    function = called[1] if called else ""
    counts = kind in (Kind.COUNTER, Kind.HISTOGRAM)
    if windowed:
        fitting = {"rate", "increase"} if counts else {"changes"} if kind is Kind.GAUGE else {"last_over_time"}
        if function not in fitting:
            yield f"{function}() of the {kind.value} {name}"
    elif kind is Kind.HISTOGRAM:
        yield f"the histogram {name} without rate()"
    if name.endswith("_bucket") and kind is Kind.HISTOGRAM and "histogram_quantile(" not in before:
        yield f"{name} without histogram_quantile()"


def _base(name: str) -> str | None:
    """The metric of a series; None if there is none."""
    if name in METRICS:
        return name if METRICS[name].kind is not Kind.HISTOGRAM else None
    for end in OF_HISTOGRAMS:
        base = name.removesuffix(end)
        if base != name and base in METRICS and METRICS[base].kind is Kind.HISTOGRAM:
            return base
    return None


def _labels_within(expr: str) -> set[str]:
    labels = set(TARGET)
    for match in _SELECTOR.finditer(expr):
        base = _base(match["name"])
        if base is not None and not expr[: match.start()].endswith(("on (job, instance) ", "last_over_time(")):
            labels |= {label.name for label in METRICS[base].labels}
            labels |= {"le"} if match["name"].endswith("_bucket") else set()
    return labels


def _closing(text: str, at: int) -> int:
    """Where the parenthesis ends that has been opened before `at`."""
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at - 1
