"""The metrics, the health and the page of collectors, over a board."""

from __future__ import annotations

import dataclasses
import gzip
from http import HTTPStatus

from gpulaunch.exporters.http import Request, Response
from gpulaunch.exporters.prometheus.render import OPENMETRICS, TEXT, Board
from gpulaunch.exporters.web.routes import routes
from gpulaunch.profiler.record import Collector, NodeState


def asked(**headers: str) -> Request:
    return Request(method="GET", path="/", host=None, accept=headers.get("accept", ""), minor=1, headers=headers)


def test_the_pages_over_a_board(node: NodeState) -> None:
    now_s = 6.0
    board = Board(version="1")
    pages = routes(board, stale_s=10.0, clock=lambda: now_s)
    assert pages["/healthz"](asked()).status is HTTPStatus.SERVICE_UNAVAILABLE
    assert b"no run yet" in pages["/collectors"](asked()).body
    assert "/" not in pages, "that is the page of the run"

    board.publish(node)
    assert pages["/healthz"](asked()) == Response(body=b"ok\n")
    assert pages["/metrics"](asked()).content_type == TEXT
    assert pages["/metrics"](asked(accept="application/openmetrics-text")).content_type == OPENMETRICS
    collectors = pages["/collectors"](asked()).body
    assert b"digits_ddp" in collectors
    assert b"&lt;Permission denied&gt;" in collectors
    assert b"<Permission" not in collectors

    now_s = 60.0
    health = pages["/healthz"](asked())
    assert (health.status, health.body) == (HTTPStatus.SERVICE_UNAVAILABLE, b"stale: last refresh 54 s ago\n")


def test_metrics_are_packed_for_who_likes_that(node: NodeState) -> None:
    board = Board(version="1")
    board.publish(node)
    pages = routes(board)
    whole = pages["/metrics"](asked())
    packed = pages["/metrics"](asked(**{"accept-encoding": "gzip"}))

    assert whole.headers == {"Vary": "Accept, Accept-Encoding"}
    assert packed.headers == {"Vary": "Accept, Accept-Encoding", "Content-Encoding": "gzip"}
    assert packed.content_type == whole.content_type
    assert gzip.decompress(packed.body) == whole.body
    assert pages["/metrics"](asked(**{"accept-encoding": "gzip;q=0"})).body == whole.body


def test_the_page_of_collectors_shows_text_of_others_and_does_nothing_it_says(node: NodeState) -> None:
    """Neither a tag, nor marks that turn text around or hide some of it."""
    hostile = "<script>\u202egpj.exe\u200b\x1b[2J\ud800 caf\u00e9"
    collectors = {
        **node.collectors,
        Collector.STORE: dataclasses.replace(next(iter(node.collectors.values())), reason=hostile),
    }
    faulty = dataclasses.replace(node.training[0], hooks_unavailable=("copies",), fault=hostile)
    board = Board(version="1")
    assert node.group is not None
    group = dataclasses.replace(node.group, name=hostile)
    board.publish(dataclasses.replace(node, collectors=collectors, training=(faulty,), group=group))

    page = routes(board)["/collectors"](asked()).body.decode()

    shown = "&lt;script&gt;\\u202egpj.exe\\u200b\\x1b[2J\\ud800 caf\u00e9"
    assert page.count(shown) == 3
    assert page.removesuffix("\n").isprintable()
