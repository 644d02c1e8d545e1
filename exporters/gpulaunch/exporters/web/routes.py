"""The routes for scrapers and probes: metrics, health, and a plain page with the condition of each collector."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus

from gpulaunch.exporters.http import Request, Response, Route, takes_gzip
from gpulaunch.exporters.prometheus.render import Board
from gpulaunch.profiler.record import NodeState

STALE_S = 10.0
"""A state older than this means that the sidecar is stuck: a refresh takes milliseconds and runs every second."""


def routes(
    board: Board, *, stale_s: float = STALE_S, clock: Callable[[], float] = time.monotonic
) -> Mapping[str, Route]:
    """Return the routes over a board."""

    def metrics(request: Request) -> Response:
        gzipped = takes_gzip(request.headers.get("accept-encoding", ""))
        content_type, body = board.metrics(request.accept, gzipped=gzipped)
        headers = {"Vary": "Accept, Accept-Encoding"}
        if gzipped:
            headers["Content-Encoding"] = "gzip"
        return Response(content_type=content_type, body=body, headers=headers)

    def health(_: Request) -> Response:
        state = board.state
        if state is None:
            return Response(status=HTTPStatus.SERVICE_UNAVAILABLE, body=b"starting\n")
        age_s = clock() - state.taken_monotonic_ns / 1e9
        if age_s > stale_s:
            return Response(
                status=HTTPStatus.SERVICE_UNAVAILABLE, body=f"stale: last refresh {age_s:.0f} s ago\n".encode()
            )
        return Response(body=b"ok\n")

    def collectors(_: Request) -> Response:
        return Response(content_type="text/html; charset=utf-8", body=_collectors(board.state).encode())

    return {"/metrics": metrics, "/healthz": health, "/collectors": collectors}


def _collectors(state: NodeState | None) -> str:
    name = state.group.name if state is not None and state.group is not None else "no run yet"
    rows = "".join(
        f"<tr><td>{collector.value}</td><td>{'available' if condition.available else 'not available'}</td>"
        f"<td>{_shown(condition.reason)}</td></tr>"
        for collector, condition in (state.collectors.items() if state is not None else ())
    )
    rows += "".join(
        f"<tr><td>probe of rank {training.rank}</td><td>in part</td><td>{_shown(training.fault)}</td></tr>"
        for training in (state.training if state is not None else ())
        if training.hooks_unavailable
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>gpulaunch</title>'
        "<style>body{font-family:sans-serif;margin:2em}td{padding-right:1em}</style>"
        f"<h1>gpulaunch: {_shown(name)}</h1>"
        '<p><a href="/metrics">metrics</a> for Prometheus, <a href="/healthz">health</a> of this sidecar</p>'
        f"<table>{rows}</table></html>\n"
    )


def _shown(text: str) -> str:
    r"""Escape foreign text for a page: no tags, and characters that reorder or hide text become `\u202e`."""
    return html.escape("".join(each if each.isprintable() else ascii(each)[1:-1] for each in text))
