"""The newest state as a page of metrics, in Prometheus' text format or in OpenMetrics.

A page is written when it is first asked for after a refresh, so an endpoint that nobody scrapes costs nothing, and one
that is hammered costs one page a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client.exposition import generate_latest as write_text
from prometheus_client.openmetrics.exposition import generate_latest as write_openmetrics

from gpulaunch.exporters.prometheus.values import Facts, families
from gpulaunch.profiler.record import NodeState

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def negotiate(accept: str) -> str:
    """Give the content type for an Accept header: OpenMetrics if it is liked at least as much as plain text."""
    weight = {"application/openmetrics-text": 0.0, "text/plain": 0.0, "text/*": 0.0, "*/*": 0.0}
    for clause in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in clause.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        if kind in weight and quality.replace(".", "", 1).isdecimal() and quality.isascii():
            weight[kind] = max(weight[kind], float(quality))
    openmetrics = weight.pop("application/openmetrics-text")
    return OPENMETRICS if openmetrics and openmetrics >= max(weight.values()) else TEXT


class Board:
    """The newest state, and the pages written from it. `publish` may be called from another thread than the rest."""

    def __init__(self, *, version: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._facts = Facts(version=version)
        self._clock = clock
        self._state: NodeState | None = None
        self._pages: dict[str, tuple[NodeState, bytes]] = {}

    @property
    def state(self) -> NodeState | None:
        """The newest state; None before the first refresh."""
        return self._state

    def publish(self, state: NodeState) -> None:
        """Show this state from now on."""
        self._state = state  # one reference, replaced whole: a reader has the old state or the new one

    def metrics(self, accept: str) -> tuple[str, bytes]:
        """Give the content type and the page of metrics, as an Accept header asks for it."""
        state = self._state
        kind = negotiate(accept)
        facts = self._facts = _asked_again(self._facts)
        if state is None:
            return kind, b"# EOF\n" if kind == OPENMETRICS else b""
        cached = self._pages.get(kind)
        if cached is not None and cached[0] is state:
            return kind, cached[1]
        started = self._clock()
        page = (write_openmetrics if kind == OPENMETRICS else write_text)(families(state, facts))
        self._pages[kind] = (state, page)
        self._facts = Facts(version=facts.version, scrapes=facts.scrapes, render_s=self._clock() - started)
        return kind, page


def _asked_again(facts: Facts) -> Facts:
    return Facts(version=facts.version, scrapes=facts.scrapes + 1, render_s=facts.render_s)
