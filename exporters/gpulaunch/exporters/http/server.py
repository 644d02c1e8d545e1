"""A small HTTP server on an already bound socket: one thread, and no request can block another.

The agent binds the socket and keeps it open, so a restarted sidecar has the same port, and connections made meanwhile
wait in the backlog. One asyncio loop, in a thread of its own, serves all connections; each may send one short head,
gets one response and has `DEADLINE_S` in total. When `MAX_CONNECTIONS` are open, a new connection replaces the oldest
one that has its response, or else the oldest: a new scraper is always served. There is no thread for each connection,
as `http.server` would have: it could not be started at the task limit of the control group.

It answers GET and HEAD and changes nothing. A page in a browser may point its own host name at this address (DNS
rebinding) and then read the response; the name is in the Host header, so only names that belong to this endpoint are
answered. Slow responses are made in another thread: a page may return a future, and its client waits while others are
served.

With a certificate the server speaks TLS; with a token it requires it (`Authorization: Bearer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from http import HTTPStatus
from typing import TypeVar

from gpulaunch.exporters.http.auth import RequestGuard, holds_token, same_origin
from gpulaunch.exporters.http.request import Request, RequestError, parse_head
from gpulaunch.exporters.http.response import Response, encode_head, error

_T = TypeVar("_T")

MAX_CONNECTIONS = 128
MAX_HEAD_BYTES = 8192
MAX_DISCARDED_BYTES = 1 << 20
DEADLINE_S = 10.0
PROGRESS_BYTES = 1 << 16
"""Each time a client has taken this many bytes of a long response, its `DEADLINE_S` starts again."""
SWITCH_S = 0.0005
"""Thread switch interval, for computing threads to yield to this one: the default is 10x, at each system call."""
_NO_DESCRIPTOR_S = 1.0
"""Pause in accepting when the process has no free descriptor, and no connection to drop."""
_BY_ANY_NAME = frozenset(("/metrics", "/healthz"))
"""Paths answered under any host name at an endpoint bound to all addresses: for scrapers and probes."""


Route = Callable[[Request], Response]
"""Returns the response to a request, synchronously."""

Page = Callable[[Request], "Response | Future[Response]"]
"""Returns the response to a request, or a future of it; cancelled when its client is gone."""


class _Connection:
    """One client."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.task: asyncio.Task[None]
        """Serves it; cancelled to drop it."""
        self.deadline: asyncio.TimerHandle
        """Drops it."""
        self.served = False
        """It has its response, and is only read from, so that the response is not lost to a reset."""


class HttpServer:
    """Serves routes on a bound, listening socket until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        routes: Mapping[str, Route],
        *,
        pages: Mapping[str, Page] | None = None,
        public: Collection[str] = (),
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        hostname: str | None = None,
        deadline_s: float = DEADLINE_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        """Create the server; `start` starts it.

        Args:
            listener: bound and listening; the caller keeps ownership.
            routes: by path, for scrapers.
            pages: by path, for browsers; they take precedence over the same path in `routes`.
            public: paths that need no token.
            token: required for every other path. None: no token is required.
            tls: context with the certificate; None: plain HTTP.
            hostname: of this machine; None: query it.
            deadline_s: for a request and the beginning of its response.
            max_connections: at a time.
        """
        self._listener = listener
        self._routes = routes
        self._pages = pages or {}
        self._public = frozenset(public)
        self._token = token
        self._tls = tls
        self._guard = RequestGuard(listener.getsockname()[0], socket.gethostname() if hostname is None else hostname)
        self._deadline_s = deadline_s
        self._max_connections = max_connections
        self._connections: dict[_Connection, None] = {}  # in order of arrival
        self._loop: asyncio.AbstractEventLoop
        self._stop = asyncio.Event()
        self._switch_s = sys.getswitchinterval()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Serve in a separate thread; also shortens the interpreter's thread switch interval."""
        sys.setswitchinterval(min(self._switch_s, SWITCH_S))
        self._listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still serves; if not, and `close` was not called, a bug has ended it."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving and drop all connections; the listening socket stays open (the caller owns it). Idempotent."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        sys.setswitchinterval(self._switch_s)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # in the end it cancels the connections
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop.add_reader(self._listener, self._accept)
        await self._stop.wait()
        self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as reason:
            if reason.errno in (errno.EMFILE, errno.ENFILE):
                # Without a free descriptor the listener stays readable, and the loop would spin: make room, or wait.
                pause_s = 0.0 if self._drop_one() else _NO_DESCRIPTOR_S
                self._loop.remove_reader(self._listener)
                self._loop.call_later(pause_s, self._loop.add_reader, self._listener, self._accept)
            return  # or the client left before it was accepted
        if len(self._connections) >= self._max_connections:
            self._drop_one()
        sock.setblocking(False)
        connection = _Connection(sock)
        self._connections[connection] = None
        connection.task = self._loop.create_task(self._serve_one(connection))
        connection.deadline = self._deadline(connection)
        connection.task.add_done_callback(lambda _: self._forget(connection))

    def _drop_one(self) -> bool:
        """Drop the oldest connection that has its response, or else the oldest; False: there is none."""
        served = (each for each in self._connections if each.served)
        connection = next(served, next(iter(self._connections), None))
        if connection is None:
            return False
        del self._connections[connection]
        connection.task.cancel()
        return True

    def _deadline(self, connection: _Connection) -> asyncio.TimerHandle:
        return self._loop.call_later(self._deadline_s, connection.task.cancel)

    def _forget(self, connection: _Connection) -> None:
        connection.deadline.cancel()
        self._connections.pop(connection, None)
        connection.sock.close()

    async def _serve_one(self, connection: _Connection) -> None:
        """Read one request, respond, and read on until the client closes."""
        # Reset by the client, or not TLS: there is no recipient any more.
        with contextlib.suppress(OSError):
            if self._tls is not None:
                connection.sock = tls = self._tls.wrap_socket(
                    connection.sock, server_side=True, do_handshake_on_connect=False
                )
                await _when_ready(tls, tls.do_handshake)
            response, head_only = await self._receive(connection.sock)
            await self._send(connection, response, b"" if head_only else response.body)
            connection.served = True
            await _linger(connection.sock)

    async def _receive(self, sock: socket.socket) -> tuple[Response, bool]:
        """Read a request; return the response to it, and whether only the head of that is wanted."""
        head_only = False
        try:
            request = parse_head(await _receive_head(sock))
            head_only = request.method == "HEAD"
            response = self._dispatch(request)
            if isinstance(response, Future):
                response = await _result(response)
        except RequestError as refused:
            response = error(refused.status)
        return response, head_only

    def _dispatch(self, request: Request) -> Response | Future[Response]:
        if request.method not in ("GET", "HEAD"):
            raise RequestError(HTTPStatus.METHOD_NOT_ALLOWED)
        page = self._pages.get(request.path)
        # A client with the token is no foreign page, whatever host name it used.
        strange_names = request.path in _BY_ANY_NAME or self._token is not None
        if not self._guard.admits(request.host, strange_names=strange_names):
            raise RequestError(HTTPStatus.FORBIDDEN)
        if not same_origin(request.headers.get("origin"), request.host):
            raise RequestError(HTTPStatus.FORBIDDEN)
        needed = None if request.path in self._public else self._token
        if needed is not None and not holds_token(request.headers.get("authorization", ""), needed):
            raise RequestError(HTTPStatus.UNAUTHORIZED)
        route = self._routes.get(request.path)
        try:
            if page is not None:
                return page(request)
            if route is not None:
                return route(request)
        except Exception:  # a bug in one page must not end the server
            return error(HTTPStatus.INTERNAL_SERVER_ERROR)
        raise RequestError(HTTPStatus.NOT_FOUND)

    async def _send(self, connection: _Connection, response: Response, body: bytes) -> None:
        whole = memoryview(body)  # a copy for each client that does not read would fill the memory
        await _send_all(connection.sock, memoryview(encode_head(response) + whole[:PROGRESS_BYTES]))
        for begin in range(PROGRESS_BYTES, len(whole), PROGRESS_BYTES):
            connection.deadline.cancel()
            connection.deadline = self._deadline(connection)
            await _send_all(connection.sock, whole[begin : begin + PROGRESS_BYTES])


async def _when_ready(sock: socket.socket, operation: Callable[[], _T], *, writes: bool = False) -> _T:
    """Do this with the socket at once or, while that would block, as soon as the kernel says that it is ready.

    asyncio's streams do the same, but with TLS each has a buffer of 256 KiB: 34 MB for 128 clients that say nothing.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return operation()
        except ssl.SSLWantReadError:
            writes = False
        except ssl.SSLWantWriteError:
            writes = True
        except BlockingIOError:
            pass
        ready: asyncio.Future[None] = loop.create_future()
        add, remove = (loop.add_writer, loop.remove_writer) if writes else (loop.add_reader, loop.remove_reader)
        add(sock, _settle, ready)
        try:
            await ready
        finally:
            remove(sock)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _receive_some(sock: socket.socket) -> bytes:
    return await _when_ready(sock, lambda: sock.recv(MAX_HEAD_BYTES))


async def _receive_head(sock: socket.socket) -> bytes:
    """Return what is before the first empty line.

    Raises:
        RequestError: it is too long.
        OSError: the client has closed before its end.
    """
    received = b""
    while (end := re.search(rb"\r?\n\r?\n", received)) is None and len(received) < MAX_HEAD_BYTES:
        data = await _receive_some(sock)
        if not data:
            raise ConnectionResetError
        received += data
    if end is None or end.start() > MAX_HEAD_BYTES:
        raise RequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    return received[: end.start()]


async def _send_all(sock: socket.socket, data: memoryview) -> None:
    while data:
        data = data[await _when_ready(sock, functools.partial(sock.send, data), writes=True) :]


async def _result(made: Future[Response]) -> Response:
    """Wait for a page; it is cancelled with this coroutine, else its worker would keep it."""
    try:
        return await asyncio.wrap_future(made)
    except Exception:  # a bug, as in a synchronous page
        return error(HTTPStatus.INTERNAL_SERVER_ERROR)


async def _linger(sock: socket.socket) -> None:
    """Shut down the write side, and read until the client closes.

    Closing while the client still sends would reset the connection, and the response might be lost.
    """
    if isinstance(sock, ssl.SSLSocket):
        with contextlib.suppress(OSError):
            sock.unwrap()  # close_notify of TLS; its reply is not needed
    sock.shutdown(socket.SHUT_WR)
    discarded = 0
    while discarded <= MAX_DISCARDED_BYTES and (data := await _receive_some(sock)):
        discarded += len(data)
