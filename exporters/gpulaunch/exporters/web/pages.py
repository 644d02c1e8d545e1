"""Serves the web page: the page, its assets, what it shows, and the run as JSON. Nothing is loaded from elsewhere."""

from __future__ import annotations

import functools
import importlib.util
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Generic, TypeVar

from gpulaunch.exporters.http import Page, Request, Response, takes_gzip
from gpulaunch.exporters.view.as_json import to_json
from gpulaunch.exporters.web.live_documents import (
    REST,
    LiveDocument,
    LiveViews,
    PackedJson,
    in_thread,
    packed,
    page_of,
)
from gpulaunch.profiler.record import NodeState

_T = TypeVar("_T")

# The hash is that of the empty string: plotly creates an empty style element and fills it by script.
POLICY: Final = (
    "default-src 'self'; script-src 'self'; "
    "style-src 'self' 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='; img-src 'self' data:; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_STATIC: Final = Path(__file__).parent / "static"
_OF_REPORTS: Final = Path(__file__).parents[1] / "report" / "assets"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX: Final = _STATIC / "index.html"
ASSETS: Final = {
    path.name: path
    for path in (
        *(_STATIC / name for name in ("icon.svg", "live.js")),
        *(_OF_REPORTS / name for name in ("page.css", "draw.js")),
    )
}
"""The files that the page loads from /assets, by name, except the chart library."""
_PLOTLY: Final = "/assets/plotly.js"
_SLOT: Final = b"<!-- plotly -->"
_MAP_STYLE: Final = re.compile(rb'getElementById\("([0-9a-f]{64})"\)\)\{var \w+=document\.createElement\("style"\)')

PUBLIC: Final = frozenset({"/", "/healthz", _PLOTLY, *(f"/assets/{name}" for name in ASSETS)})
"""Paths that are the same for every run and need no token: the page itself prompts for the token."""


@dataclass(frozen=True, kw_only=True)
class Plotly:
    """The chart library, as shipped in its own package."""

    path: Path
    version: str


def installed_plotly() -> Plotly | None:
    """Find plotly without importing it; None: it is not installed."""
    try:
        spec = importlib.util.find_spec("plotly")
        found = version("plotly")
    except (ImportError, ValueError, PackageNotFoundError):
        return None
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place) / "package_data" / "plotly.min.js"
        if path.is_file():
            return Plotly(path=path, version=re.sub(r"[^0-9A-Za-z.+-]", "", found))
    return None


def pages(
    state: Callable[[], NodeState | None],
    run_dir: Callable[[], Path | None],
    *,
    find_plotly: Callable[[], Plotly | None] = installed_plotly,
    rest: float = REST,
) -> Mapping[str, Page]:
    """Return the pages by path.

    Args:
        state: returns the newest state.
        run_dir: returns the run directory, once known.
        find_plotly: returns the chart library.
        rest: pause after making a document of the run, as a multiple of the time it took.
    """
    views = LiveViews(run_dir)
    plotly = find_plotly()
    found: dict[str, Page] = {f"/assets/{name}": _static(path, lambda body: body) for name, path in ASSETS.items()}
    found["/"] = _static(_INDEX, lambda body: body.replace(_SLOT, _elements(plotly)))
    found["/api/run.json"] = _live(LiveDocument(state, lambda state: to_json(views.of(state)), rest=rest))
    found["/api/page.json"] = _live(LiveDocument(state, lambda state: page_of(views.of(state)), rest=rest))
    if plotly is not None:
        found[_PLOTLY] = _library(plotly.path)
    return found


def _elements(plotly: Plotly | None) -> bytes:
    """Return the HTML elements that load the chart library.

    Its maps add their own style sheet, which this page does not need and its policy forbids. They skip it if an
    element with its id already exists.
    """
    if plotly is None:
        return b""
    found = _MAP_STYLE.search(plotly.path.read_bytes())
    ours = f'<meta id="{found[1].decode()}" name="no-style-of-maps" content="">\n' if found else ""
    return f'{ours}<script src="assets/plotly.js?v={plotly.version}" defer></script>'.encode()


def _static(path: Path, finish: Callable[[bytes], bytes]) -> Page:
    """Return the page of a static file of this package, read on the first request."""

    @functools.cache
    def document() -> PackedJson:
        return packed(finish(path.read_bytes()))

    def page(request: Request) -> Response:
        return _answer(request, document(), _TYPES[path.suffix], {"Cache-Control": "no-cache"})

    return page


class _Waiters(Generic[_T]):
    """Distributes the result of a pending computation to all waiting requests.

    The computation may hang for days while requests keep coming: cancelled ones are removed, so there are never more
    waiters than concurrent connections.
    """

    def __init__(self, tell: Callable[[Request, _T], Response]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._waiting: dict[Future[_T], list[tuple[Request, Future[Response]]]] = {}

    def wait(self, request: Request, made: Future[_T]) -> Future[Response]:
        answer: Future[Response] = Future()
        with self._lock:
            others = self._waiting.get(made, [])
            self._waiting[made] = [*(each for each in others if not each[1].cancelled()), (request, answer)]
        if not others:
            made.add_done_callback(self._hand_on)  # one for all; it may be called at once
        return answer

    def _hand_on(self, made: Future[_T]) -> None:
        with self._lock:
            waiting = self._waiting.pop(made)
        for request, answer in waiting:
            if not answer.set_running_or_notify_cancel():
                continue  # its client has just disconnected
            try:
                answer.set_result(self._tell(request, made.result()))
            except BaseException as error:  # passed on to the waiters
                answer.set_exception(error)


def _live(document: LiveDocument) -> Page:
    def page(request: Request) -> Response | Future[Response]:
        newest = document.newest()
        if isinstance(newest, PackedJson):
            return told(request, newest)
        return waiters.wait(request, newest)

    def told(request: Request, newest: PackedJson) -> Response:
        return _answer(request, newest, "application/json; charset=utf-8", {"Cache-Control": "private, no-cache"})

    waiters = _Waiters(told)
    return page


def _library(path: Path) -> Page:
    """Return the page of the chart library: megabytes, compressed once, in a thread."""
    packing: list[Future[bytes]] = []

    def page(request: Request) -> Response | Future[Response]:
        if not takes_gzip(request.headers.get("accept-encoding", "")):
            return Response(body=_whole(path), content_type=_TYPES[".js"], headers=headers)
        if not packing or (packing[0].done() and packing[0].exception() is not None):
            packing[:] = [in_thread(lambda: _gzipped(path))]
        return waiters.wait(request, packing[0])

    def told(_: Request, body: bytes) -> Response:
        return Response(body=body, content_type=_TYPES[".js"], headers={**headers, "Content-Encoding": "gzip"})

    waiters = _Waiters(told)
    # Its URL contains its version.
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    return page


@functools.lru_cache(maxsize=1)
def _whole(path: Path) -> bytes:
    """Read the file once for all clients: otherwise 100 clients that do not read would hold 100 copies."""
    return path.read_bytes()


@functools.lru_cache(maxsize=1)
def _gzipped(path: Path) -> bytes:
    return packed(path.read_bytes(), level=1).gzipped


def _answer(request: Request, document: PackedJson, content_type: str, headers: Mapping[str, str]) -> Response:
    more = {**headers, "ETag": document.etag, "Vary": "Accept-Encoding", "Content-Security-Policy": POLICY}
    known = (tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(","))
    if document.etag in known:
        return Response(status=HTTPStatus.NOT_MODIFIED, body=b"", headers=more)
    if takes_gzip(request.headers.get("accept-encoding", "")):
        more["Content-Encoding"] = "gzip"
        return Response(body=document.gzipped, content_type=content_type, headers=more)
    return Response(body=document.body, content_type=content_type, headers=more)
