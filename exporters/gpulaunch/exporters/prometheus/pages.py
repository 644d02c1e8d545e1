"""What the endpoint answers: the metrics, its health, and a plain page of links that says how each collector does."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus

from gpulaunch.exporters.prometheus.render import Board
from gpulaunch.exporters.prometheus.serve import Answer, Route
from gpulaunch.profiler.record import NodeState

STALE_S = 10.0
"""A state older than this means that the sidecar is stuck: its refresh takes milliseconds and comes every second."""


def routes(
    board: Board, *, stale_s: float = STALE_S, clock: Callable[[], float] = time.monotonic
) -> Mapping[str, Route]:
    """Give the routes over a board."""

    def metrics(accept: str) -> Answer:
        content_type, body = board.metrics(accept)
        return Answer(content_type=content_type, body=body)

    def health(_: str) -> Answer:
        state = board.state
        if state is None:
            return Answer(status=HTTPStatus.SERVICE_UNAVAILABLE, body=b"starting\n")
        age_s = clock() - state.taken_monotonic_ns / 1e9
        if age_s > stale_s:
            return Answer(
                status=HTTPStatus.SERVICE_UNAVAILABLE, body=f"stale: last refresh {age_s:.0f} s ago\n".encode()
            )
        return Answer(body=b"ok\n")

    def index(_: str) -> Answer:
        return Answer(content_type="text/html; charset=utf-8", body=_index(board.state).encode())

    return {"/metrics": metrics, "/healthz": health, "/": index, "/collectors": index}


def _index(state: NodeState | None) -> str:
    name = state.group.name if state is not None and state.group is not None else "no run yet"
    rows = "".join(
        f"<tr><td>{collector.value}</td><td>{'available' if condition.available else 'not available'}</td>"
        f"<td>{html.escape(condition.reason)}</td></tr>"
        for collector, condition in (state.collectors.items() if state is not None else ())
    )
    rows += "".join(
        f"<tr><td>probe of rank {training.rank}</td><td>in part</td><td>{html.escape(training.fault)}</td></tr>"
        for training in (state.training if state is not None else ())
        if training.hooks_unavailable
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>gpulaunch</title>'
        "<style>body{font-family:sans-serif;margin:2em}td{padding-right:1em}</style>"
        f"<h1>gpulaunch: {html.escape(name)}</h1>"
        '<p><a href="/metrics">metrics</a> for Prometheus, <a href="/healthz">health</a> of this sidecar</p>'
        f"<table>{rows}</table></html>\n"
    )
