"""Renders the newest state as a page of metrics, in Prometheus text format or OpenMetrics, gzipped or not.

A page is rendered on the first request after a refresh, so an endpoint that is not scraped costs nothing, and one under
load costs one page a second. With so many ranks that a scraper would have to wait, the page is rendered ahead while
scrapes keep coming: during the refresh, before its state is published. Requests in the meantime get the previous page,
so every response is complete and counters never go back.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from gpulaunch.exporters.http import weights
from gpulaunch.exporters.prometheus.lines import Lines, page_of
from gpulaunch.exporters.prometheus.values import Facts, put_state
from gpulaunch.profiler.record import NodeState

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
SLOW_S: Final = 0.01
"""A page that takes longer to render is rendered ahead of requests..."""
REMEMBER_S: Final = 75.0
"""...if its variant was requested within this time: Prometheus scrapes once a minute by default."""

_Variant: TypeAlias = tuple[str, bool]
"""A content type, and whether it is gzipped."""
_VARIANTS: Final = tuple((kind, gzipped) for kind in (TEXT, OPENMETRICS) for gzipped in (False, True))


@functools.lru_cache(maxsize=32)  # a scraper sends the same each time
def negotiate(accept: str) -> str:
    """Return the content type for an Accept header: OpenMetrics if its q-value is at least that of plain text."""
    weight = weights(accept, "application/openmetrics-text", "text/plain", "text/*", "*/*")
    openmetrics = weight.pop("application/openmetrics-text")
    return OPENMETRICS if openmetrics and openmetrics >= max(weight.values()) else TEXT


class _Shown:
    """A state and the pages rendered from it."""

    def __init__(self, state: NodeState) -> None:
        self.state = state
        self.lines: Mapping[str, str] | None = None
        self.pages: dict[_Variant, bytes] = {}
        self.spent_s = 0.0


class Board:
    """The newest state, and the pages rendered from it. `publish` may be called from another thread than the rest."""

    def __init__(self, *, version: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._version = version
        self._clock = clock
        self._shown: _Shown | None = None  # replaced whole: a reader has the old one or the new one
        self._lines = Lines(on_unknown=_say)
        # If two threads render, the second has the newer state and has counted no fewer scrapes.
        self._writing = threading.Lock()
        self._scrapes = 0
        self._render_s: float | None = None
        self._asked_s = dict.fromkeys(_VARIANTS, float("-inf"))

    @property
    def state(self) -> NodeState | None:
        """The newest state; None before the first refresh."""
        shown = self._shown
        return None if shown is None else shown.state

    def publish(self, state: NodeState) -> None:
        """Publish this state; render its pages first if requests would have to wait for them."""
        shown = _Shown(state)
        with self._writing:
            for variant in self._awaited():
                with contextlib.suppress(Exception):  # a bug: rendered again on request, or a 500
                    self._write(shown, variant)
            self._shown = shown

    def metrics(self, accept: str, *, gzipped: bool = False) -> tuple[str, bytes]:
        """Return the content type and the page of metrics for an Accept header."""
        kind = negotiate(accept)
        variant = kind, gzipped
        self._scrapes += 1
        self._asked_s[variant] = self._clock()
        shown = self._shown
        if shown is not None and (page := shown.pages.get(variant)) is not None:
            return kind, page
        with self._writing:
            shown = self._shown  # may have been replaced meanwhile
            if shown is None:
                nothing = page_of({}, openmetrics=kind == OPENMETRICS)
                return kind, _packed(nothing) if gzipped else nothing
            return kind, self._write(shown, variant)

    def _awaited(self) -> list[_Variant]:
        """Return the variants that are worth rendering ahead."""
        if self._render_s is None or self._render_s <= SLOW_S:
            return []
        now_s = self._clock()
        return [variant for variant, asked_s in self._asked_s.items() if now_s - asked_s <= REMEMBER_S]

    def _write(self, shown: _Shown, variant: _Variant) -> bytes:
        page = shown.pages.get(variant)
        if page is not None:
            return page
        kind, gzipped = variant
        began_s = self._clock()
        if shown.lines is None:
            facts = Facts(version=self._version, scrapes=self._scrapes, render_s=self._render_s)
            self._lines.begin()
            put_state(self._lines, shown.state, facts)
            shown.lines = self._lines.end()
        page = page_of(shown.lines, openmetrics=kind == OPENMETRICS)
        page = shown.pages[variant] = _packed(page) if gzipped else page
        shown.spent_s += self._clock() - began_s
        self._render_s = shown.spent_s
        return page


def _say(unknown: str) -> None:
    sys.stderr.write(f"[gpulaunch] /metrics goes on without it: {unknown}\n")


def _packed(page: bytes) -> bytes:
    return gzip.compress(page, compresslevel=1, mtime=0)
