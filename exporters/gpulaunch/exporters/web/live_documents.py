"""Makes the documents of a running run, for the page and for programs: on request, in a thread, once for all requests.

Making one reads files and takes some 10 to 100 ms, so scrapes never wait for it. An open page costs a bounded share of
a core: the next document is made only after a pause of `REST` times the duration of the previous one.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from gpulaunch.exporters.view.live import view_of_state
from gpulaunch.exporters.view.model import RunView, Status
from gpulaunch.exporters.view.source import RECENT_S
from gpulaunch.exporters.view.text import inert
from gpulaunch.profiler.record import NodeState

REST: Final = 9.0
_EARLIER_S: Final = 5.0
"""Approximate time span of `now` values that no file has."""
_MOST_POINTS: Final = 180
_FEWEST_POINTS: Final = 30
_POINTS_OF_ALL_RANKS: Final = 3000

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PackedJson:
    """A response body, its gzipped form, and its ETag."""

    body: bytes
    gzipped: bytes
    etag: str


def packed(body: bytes, *, level: int = 6) -> PackedJson:
    """Return the document of a body."""
    packer = zlib.compressobj(level, zlib.DEFLATED, 16 + zlib.MAX_WBITS)  # gzip format, without a timestamp
    gzipped = packer.compress(body) + packer.flush()
    return PackedJson(body=body, gzipped=gzipped, etag=f'"{hashlib.sha256(body).hexdigest()[:24]}"')


def in_thread(make: Callable[[], T]) -> Future[T]:
    """Call `make` in a daemon thread that ends with it and does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # passed on to the waiter
            future.set_exception(error)

    threading.Thread(target=run, name="page", daemon=True).start()
    return future


def run_dir_of(channel_dir: Path) -> Path | None:
    """Return the run directory that the agent has named in the channel directory; None: not yet."""
    try:
        told: Any = json.loads((channel_dir / "group.json").read_bytes())
        return Path(cast("str", told["run_dir"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


class LiveViews:
    """The views of a running run; `now` values are of its last seconds. Safe for several threads."""

    def __init__(self, run_dir: Callable[[], Path | None]) -> None:
        """`run_dir`: returns the run directory, once known."""
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._earlier: deque[NodeState] = deque()

    def of(self, state: NodeState) -> RunView:
        """Return the view of a state; an older one than before is compared with an older base, or with none."""
        with self._lock:
            earlier = self._base_of(state)
        world = state.group.world_size if state.group is not None else len(state.training)
        points = max(_FEWEST_POINTS, min(_MOST_POINTS, _POINTS_OF_ALL_RANKS // max(1, world)))
        return view_of_state(state, run_dir=self._run_dir(), earlier=earlier, max_points=points)

    def _base_of(self, state: NodeState) -> NodeState | None:
        """Return the state that `now` values are compared with."""
        now_ns = state.taken_monotonic_ns
        while self._earlier and now_ns - self._earlier[0].taken_monotonic_ns > 2e9 * RECENT_S:
            self._earlier.popleft()  # no request for long: too old a base for `now`
        while len(self._earlier) > 1 and now_ns - self._earlier[1].taken_monotonic_ns >= _EARLIER_S * 1e9:
            self._earlier.popleft()
        earlier = self._earlier[0] if self._earlier and self._earlier[0].taken_monotonic_ns < now_ns else None
        if not self._earlier or self._earlier[-1] is not state:
            self._earlier.append(state)
        return earlier


class LiveDocument:
    """The newest document of one kind. `newest` is for one thread."""

    def __init__(
        self,
        state: Callable[[], NodeState | None],
        make: Callable[[NodeState], dict[str, Any]],
        *,
        rest: float = REST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            state: returns the newest state.
            make: returns the document of a state, as plain values; called in a thread.
            rest: pause after making one, as a multiple of the time it took.
            clock: monotonic seconds.
        """
        self._state = state
        self._document_of = make
        self._rest = rest
        self._clock = clock
        self._lock = threading.Lock()
        self._made: tuple[NodeState | None, PackedJson] | None = None
        self._making: Future[PackedJson] | None = None
        self._not_before_s = float("-inf")

    def newest(self) -> PackedJson | Future[PackedJson]:
        """Return the last document if it is current or the next is not due yet, else a future of the next."""
        with self._lock:
            state = self._state()
            made = self._made
            if made is not None and (made[0] is state or self._clock() < self._not_before_s):
                return made[1]
            if self._making is None:
                self._making = making = in_thread(lambda: self._make(state))
                making.add_done_callback(self._finished)  # after the assignment: it may already be done
                return making
            return self._making

    def _make(self, state: NodeState | None) -> PackedJson:
        began_s = self._clock()
        plain = {"version": 1, "starting": True} if state is None else self._document_of(state)
        document = packed(json.dumps(plain, allow_nan=False, separators=(",", ":")).encode(), level=1)
        with self._lock:
            self._made = state, document
            self._not_before_s = self._clock() + self._rest * (self._clock() - began_s)
        return document

    def _finished(self, _: Future[PackedJson]) -> None:
        self._making = None


def page_of(view: RunView) -> dict[str, Any]:
    """Return what the page shows of a run: the report's document as HTML, and its charts as values."""
    from gpulaunch.exporters.report.content import report_of  # not before somebody looks: it costs memory
    from gpulaunch.exporters.report.page import body_of, chart_data

    document = report_of(view, every_rank=True)
    charts = document.charts()
    on_request = {series.name for chart in charts for series in chart.series if series.on_request}
    return {
        "version": 1,
        "title": inert(f"{view.name or 'run'}: {view.status.value} - gpulaunch"),
        "running": view.status is Status.RUNNING,
        "made": document.made,
        "ranks": [rank.rank for rank in view.ranks if f"rank {rank.rank}" in on_request],
        "findings": [inert(f"{each.rule} {each.location}".rstrip()) for each in view.findings if each.active],
        "body": body_of(document),
        "charts": chart_data(charts),
    }
