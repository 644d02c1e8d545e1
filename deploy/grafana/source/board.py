"""Rows of panels, and the dashboards that they are in: the same variables, annotations and links in each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from source.parts import DATASOURCE
from source.promql import RANGE

__all__ = ["dashboard", "row"]

Json = dict[str, Any]

TAG: Final = "gpulaunch"
NEEDS_GPU: Final = "needs a GPU: a job on the CPU has no data here"
COLUMNS: Final = 24
_SCHEMA_VERSION: Final = 39  # Grafana 10.4 and 11; newer ones read it and bring it up to date


def row(title: str, *panels: Json, gpu: bool = False) -> list[Json]:
    """Put panels below a title; those that need a GPU are in rows that say so, and say so themselves."""
    if gpu:
        title = f"{title} ({NEEDS_GPU})"
        for panel in panels:
            panel["fieldConfig"]["defaults"]["noValue"] = "no GPU in this job"
    head: Json = {
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": 0},
        "panels": [],
    }
    return [head, *panels]


def dashboard(name: str, title: str, description: str, *rows: list[Json]) -> Json:
    """Put rows below each other. The address of a dashboard is its name, and does not change with its title."""
    panels = [panel for each in rows for panel in each]
    _flow(panels)
    return {
        "id": None,
        "uid": f"{TAG}-{name}",
        "title": f"gpulaunch: {title}",
        "description": description,
        "tags": [TAG],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "asDropdown": False,
                "icon": "external link",
                "includeVars": True,
                "keepTime": True,
                "tags": [TAG],
                "targetBlank": False,
                "title": "",
                "tooltip": "",
                "type": "dashboards",
                "url": "",
            }
        ],
        "templating": {"list": _variables()},
        "annotations": {"list": _annotations()},
        "panels": panels,
    }


def _flow(panels: Iterable[Json]) -> None:
    """Give every panel its number and its place."""
    x = y = height = 0
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
        place = panel["gridPos"]
        if x + place["w"] > COLUMNS:
            x, y, height = 0, y + height, 0
        place["x"], place["y"] = x, y
        x += place["w"]
        height = max(height, place["h"])


def _variables() -> list[Json]:
    newest_first = f"query_result(topk(200, max by (run) (max_over_time(timestamp(gpulaunch_run_info)[{RANGE}:15s]))))"
    return [
        {
            "name": "datasource",
            "label": "Prometheus",
            "description": "Where the metrics are.",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
            "hide": 0,
        },
        _variable(
            "run",
            "Run",
            "Runs of gpulaunch, the newest first. Where targets have no label run of their own, every node of a run has"
            " a token: choose them all.",
            newest_first,
        )
        | {"regex": '/run="([^"]+)"/', "sort": 0, "multi": True},
        _variable(
            "node",
            "Node",
            "Where a sidecar of the run serves its metrics: one for each node.",
            'label_values(gpulaunch_run_info{run=~"$run"}, instance)',
        )
        | _ALL,
        _variable(
            "rank",
            "Rank",
            "Ranks of the nodes chosen.",
            'label_values(gpulaunch_rank_info{instance=~"$node", run=~"$run|"}, rank)',
        )
        | _ALL,
    ]


_ALL: Final[Json] = {
    "includeAll": True,
    "multi": True,
    "allValue": ".*",  # short for any number of them; which run they are of is in every query
    "current": {"text": ["All"], "value": ["$__all"]},
    "sort": 3,
}


def _variable(name: str, label: str, description: str, query: str) -> Json:
    return {
        "name": name,
        "label": label,
        "description": description,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"qryType": 0, "query": query, "refId": name},
        "refresh": 2,
        "hide": 0,
        "includeAll": False,
        "multi": False,
    }


def _annotations() -> list[Json]:
    run = 'and on (job, instance) gpulaunch_run_info{run=~"$run"}'
    return [
        {
            "builtIn": 1,
            "datasource": {"type": "grafana", "uid": "-- Grafana --"},
            "enable": True,
            "hide": True,
            "iconColor": "rgba(0, 211, 255, 1)",
            "name": "Annotations & Alerts",
            "type": "dashboard",
        },
        _annotation(
            "Restarts",
            "red",
            f'max(changes(gpulaunch_attempt{{instance=~"$node", run=~"$run|"}}[1m]) {run}) > 0',
            "restart",
            "The ranks were started again.",
        ),
        _annotation(
            "Findings",
            "orange",
            f'max by (rule) (gpulaunch_finding_active{{instance=~"$node", run=~"$run|"}} {run}) > 0',
            "{{rule}}",
            "A rule finds something; the run's report has the line.",
        ),
    ]


def _annotation(name: str, color: str, expr: str, title: str, text: str) -> Json:
    return {
        "datasource": DATASOURCE,
        "enable": True,
        "expr": expr,
        "hide": False,
        "iconColor": color,
        "name": name,
        "step": "1m",  # as the window of `changes`: no restart falls between two of them
        "tagKeys": "",
        "textFormat": text,
        "titleFormat": title,
        "useValueForTime": False,
    }
