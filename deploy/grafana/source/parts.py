"""Panels as plain dictionaries, as Grafana's JSON has them; a panel's unit comes from its expressions.

Their places come later, from the dashboard that they are put into.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from source.expr import Expr, QueryError
from source.limits import WORDS, Limit, NoLimit, described, steps_of
from source.promql import RANGE

__all__ = ["DATASOURCE", "Json", "Target", "bars", "figure", "heat", "lines", "table", "words"]

Json = dict[str, Any]
Target = tuple[Expr, str]
"""An expression and its legend: words, and labels as {{label}}."""

DATASOURCE: Final[Json] = {"type": "prometheus", "uid": "${datasource}"}
_LABEL: Final = re.compile(r"\{\{(\w+)\}\}")


def lines(
    title: str,
    description: str,
    *targets: Target,
    width: int = 12,
    height: int = 8,
    stacked: bool = False,
    limit: Limit,
    most: float | None = None,
    signed: bool = False,
) -> Json:
    """Draw lines over time; stacked ones are parts of a whole, signed ones may be below zero."""
    custom: Json = {
        "drawStyle": "line",
        "fillOpacity": 60 if stacked else 8,
        "lineWidth": 1,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if stacked else "none"},
        "thresholdsStyle": {"mode": "off" if isinstance(limit, NoLimit) else "dashed"},
    }
    options: Json = {
        "legend": {"calcs": ["lastNotNull", "max"], "displayMode": "table", "placement": "right", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    panel = _panel("timeseries", title, description, targets, (width, height), options, custom, limit, most)
    if signed:
        del panel["fieldConfig"]["defaults"]["min"]
    return panel


def figure(title: str, description: str, *targets: Target, limit: Limit, width: int = 4, signed: bool = False) -> Json:
    """Show one number, which may be below zero if it is signed: the last one known in the time that is looked at."""
    options: Json = {
        "colorMode": "value",
        "graphMode": "none" if any(_is_instant(expr) for expr, _ in targets) else "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showPercentChange": False,
        "textMode": "value_and_name" if len(targets) > 1 else "value",
        "wideLayout": True,
    }
    panel = _panel("stat", title, description, targets, (width, 4), options, {}, limit)
    if signed:
        del panel["fieldConfig"]["defaults"]["min"]
    return panel


def heat(title: str, description: str, target: Target, *, limit: NoLimit, width: int = 24, height: int = 10) -> Json:
    """Draw one row of cells for each series, the higher the warmer: many ranks at a glance. It cannot draw limits."""
    expr, _ = target
    options: Json = {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {"unit": expr.grafana_unit},
        "color": {
            "exponent": 0.5,
            "fill": "dark-orange",
            "mode": "scheme",
            "reverse": False,
            "scale": "exponential",
            "scheme": "Turbo",
            "steps": 64,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": True},
    }
    return _panel("heatmap", title, description, (target,), (width, height), options, {}, limit)


def bars(title: str, description: str, *targets: Target, limit: Limit, width: int = 12, height: int = 8) -> Json:
    """Draw a bar for each series: what it is now."""
    options: Json = {
        "displayMode": "gradient",
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": False},
        "maxVizHeight": 300,
        "minVizHeight": 16,
        "minVizWidth": 8,
        "namePlacement": "auto",
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showUnfilled": True,
        "sizing": "auto",
        "valueMode": "color",
    }
    return _panel("bargauge", title, description, targets, (width, height), options, {}, limit)


def table(
    title: str, description: str, expr: Expr, columns: Mapping[str, str], *, limit: Limit, width: int = 12
) -> Json:
    """List the series that there are now: `columns` are labels, and "Value", by what stands above them.

    A limit is one of the values.
    """
    _has_labels(set(columns) - {"Value"}, expr)
    options: Json = {"cellHeight": "sm", "frameIndex": 0, "showHeader": True}
    custom: Json = {"align": "auto", "cellOptions": {"type": "auto"}, "filterable": True, "inspect": False}
    panel = _panel("table", title, description, ((expr, ""),), (width, 8), options, custom, limit)
    panel["targets"][0] |= {"format": "table", "instant": True, "range": False}
    hidden = dict.fromkeys(
        ["Time", *(["Value"] if "Value" not in columns else []), *sorted(expr.labels - set(columns))]
    )
    panel["transformations"] = [
        {
            "id": "organize",
            "options": {
                "excludeByName": dict.fromkeys(hidden, True),
                "indexByName": {name: index for index, name in enumerate(columns)},
                "renameByName": dict(columns),
            },
        }
    ]
    if not isinstance(limit, NoLimit):
        colored = {"id": "custom.cellOptions", "value": {"type": "color-text"}}
        matcher = {"id": "byName", "options": columns["Value"]}
        panel["fieldConfig"]["overrides"] = [{"matcher": matcher, "properties": [colored]}]
    return panel


def words(title: str, description: str, text: str, *, width: int = 24, height: int = 3) -> Json:
    """Say something."""
    return {
        "type": "text",
        "title": title,
        "description": described(description, WORDS),
        "gridPos": {"h": height, "w": width, "x": 0, "y": 0},
        "options": {"content": text, "mode": "markdown"},
    }


def _panel(
    kind: str,
    title: str,
    description: str,
    targets: Iterable[Target],
    size: tuple[int, int],
    options: Json,
    custom: Json,
    limit: Limit,
    most: float | None = None,
) -> Json:
    targets = tuple(targets)
    units = {expr.grafana_unit for expr, _ in targets}
    if len(units) != 1:
        raise QueryError(f"{title}: one panel, and the units {sorted(units)}")
    defaults: Json = {
        "color": {"mode": "thresholds" if kind in ("stat", "bargauge") else "palette-classic"},
        "custom": custom,
        "min": 0,
        "thresholds": {
            "mode": "absolute",
            "steps": [{"color": color, "value": value} for value, color in steps_of(limit)],
        },
        "unit": units.pop(),
    }
    if most is not None:
        defaults["max"] = most
    return {
        "type": kind,
        "title": title,
        "description": described(description, limit),
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "gridPos": {"h": size[1], "w": size[0], "x": 0, "y": 0},
        "options": options,
        "targets": [_target(index, expr, legend) for index, (expr, legend) in enumerate(targets)],
    }


def _target(index: int, expr: Expr, legend: str) -> Json:
    _has_labels(set(_LABEL.findall(legend)), expr)
    instant = _is_instant(expr)
    return {
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": expr.text,
        "format": "time_series",
        "instant": instant,
        "legendFormat": legend,
        "range": not instant,
        "refId": chr(ord("A") + index),
    }


def _is_instant(expr: Expr) -> bool:
    """What is asked of the whole time that is looked at is asked once, at its end."""
    return f"[{RANGE}]" in expr.text


def _has_labels(names: set[str], expr: Expr) -> None:
    if missing := names - expr.labels:
        raise QueryError(f"no label {sorted(missing)} in the result of {expr.text}")
