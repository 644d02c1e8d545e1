"""A small HTTP server on an already bound socket: one thread, and no request can block another.

The agent binds the socket and keeps it open, so a restarted sidecar has the same port, and connections made meanwhile
wait in the backlog. One epoll loop serves all connections; each may send one short head, gets one response and has
`DEADLINE_S` in total. When `MAX_CONNECTIONS` are open, a new connection replaces the oldest one that has its response,
or else the oldest: a new scraper is always served. Most clients have sent their request before they are accepted, and
the response fits into the kernel's buffers: the server reads and writes at once, and waits only when that would block.

It answers GET and HEAD and changes nothing. A page in a browser may point its own host name at this address (DNS
rebinding) and then read the response; the name is in the Host header, so only names that belong to this endpoint are
answered. Slow responses are made in another thread: a page may return a future, and its client waits while others are
served.

With a certificate the server speaks TLS; with a token it requires it (`Authorization: Bearer`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import selectors
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus

from gpulaunch.exporters.http.auth import RequestGuard, holds_token, same_origin
from gpulaunch.exporters.http.request import Request, RequestError, parse_head

MAX_CONNECTIONS = 128
MAX_HEAD_BYTES = 8192
MAX_DISCARDED_BYTES = 1 << 20
DEADLINE_S = 10.0
PROGRESS_BYTES = 1 << 16
"""Each time a client has taken this many bytes of a long response, its `DEADLINE_S` starts again."""
SWITCH_S = 0.0005
"""Thread switch interval, for computing threads to yield to this one: the default is 10x, at each system call."""
_PLAIN = "text/plain; charset=utf-8"
_BY_ANY_NAME = frozenset(("/metrics", "/healthz"))
"""Paths answered under any host name at an endpoint bound to all addresses: for scrapers and probes."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The response of a route."""

    body: bytes
    content_type: str = _PLAIN
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Additional headers, or overrides of those that every response has."""


Route = Callable[[Request], Answer]
"""Returns the response to a request, synchronously."""

Page = Callable[[Request], "Answer | Future[Answer]"]
"""Returns the response to a request, or a future of it; cancelled when its client is gone."""


class _Stage(Enum):
    """The state of a client; a closing one is still read from, so that its response is not lost to a reset."""

    GREETING = "greeting"
    ASKING = "asking"
    WAITING = "waiting"
    TAKING = "taking"
    CLOSING = "closing"


class _Connection:
    """One client."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self.sock = sock
        self.deadline_s = deadline_s
        self.stage = _Stage.GREETING if isinstance(sock, ssl.SSLSocket) else _Stage.ASKING
        self.received = bytearray()
        self.awaited: Future[Answer] | None = None
        self.head_only = False
        self.watched = 0
        """The selector events that are waited for."""
        self.out: list[memoryview] = []
        self.taken_bytes = 0
        self.discarded_bytes = 0


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
        self._selector = selectors.DefaultSelector()
        self._connections: dict[_Connection, None] = {}  # in order of arrival
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._switch_s = sys.getswitchinterval()
        self._stopping = False
        self._lock = threading.Lock()  # a waking thread must not write to a closed descriptor
        self._made: deque[tuple[_Connection, Future[Answer]]] = deque()
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)

    def start(self) -> None:
        """Serve in a separate thread; also shortens the interpreter's thread switch interval."""
        sys.setswitchinterval(min(self._switch_s, SWITCH_S))
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still serves; if not, and `close` was not called, a bug has ended it."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving and drop all connections; the listening socket stays open (the caller owns it). Idempotent."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        sys.setswitchinterval(self._switch_s)
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        os.close(self._wakeup)

    def _serve(self) -> None:
        while not self._stopping:
            first_s = min((connection.deadline_s for connection in self._connections), default=None)
            wait_s = None if first_s is None else max(0.0, first_s - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wakeup:
                    self._hand_out()
                elif isinstance(connection := key.data, _Connection) and connection in self._connections:
                    self._advance(connection)
            now = time.monotonic()
            for connection in [connection for connection in self._connections if connection.deadline_s <= now]:
                self._drop(connection)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # Without a free descriptor the listener stays readable and this loop would spin: make room, or wait.
                if self._connections:
                    self._drop(next(iter(self._connections)))
                else:
                    threading.Event().wait(1.0)
            return  # or the client left before it was accepted
        if len(self._connections) >= self._max_connections:
            served = (each for each in self._connections if each.stage is _Stage.CLOSING)
            self._drop(next(served, next(iter(self._connections))))
        sock.setblocking(False)
        if self._tls is not None:
            try:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            except OSError:  # disconnected already
                sock.close()
                return
        connection = _Connection(sock, time.monotonic() + self._deadline_s)
        self._connections[connection] = None
        self._advance(connection)

    def _advance(self, connection: _Connection) -> None:
        """Do all I/O this client is ready for, then wait for the rest."""
        try:
            self._go_on(connection)
        except ssl.SSLWantReadError:
            self._watch(connection, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._watch(connection, selectors.EVENT_WRITE)
        except BlockingIOError:
            taking = connection.stage is _Stage.TAKING
            self._watch(connection, selectors.EVENT_WRITE if taking else selectors.EVENT_READ)
        except OSError:  # reset by the client, or not TLS: there is no recipient any more
            self._drop(connection)

    def _go_on(self, connection: _Connection) -> None:
        if connection.stage is _Stage.GREETING:
            assert isinstance(connection.sock, ssl.SSLSocket), "only TLS begins with a greeting"
            connection.sock.do_handshake()
            connection.stage = _Stage.ASKING
        if connection.stage is _Stage.TAKING:
            self._send(connection)
            return
        data = self._receive(connection)
        if not data:
            self._drop(connection)
        elif connection.stage is _Stage.ASKING:
            self._hear(connection, data)
        else:
            connection.discarded_bytes += len(data)
            if connection.discarded_bytes > MAX_DISCARDED_BYTES:
                self._drop(connection)

    def _watch(self, connection: _Connection, events: int) -> None:
        """Make this connection wait for these selector events; 0: for none."""
        if events == connection.watched:
            return
        if not connection.watched:
            self._selector.register(connection.sock, events, connection)
        elif events:
            self._selector.modify(connection.sock, events, connection)
        else:
            self._selector.unregister(connection.sock)
        connection.watched = events

    @staticmethod
    def _receive(connection: _Connection) -> bytes:
        data = connection.sock.recv(MAX_HEAD_BYTES)
        # Bytes that TLS has already decrypted do not make the descriptor readable.
        while isinstance(connection.sock, ssl.SSLSocket) and (more := connection.sock.pending()):
            data += connection.sock.recv(more)
        return data

    def _hear(self, connection: _Connection, data: bytes) -> None:
        """Add bytes of a request, and begin to respond when its head is complete (or invalid)."""
        connection.received += data
        end = re.search(rb"\r?\n\r?\n", connection.received)
        if end is None and len(connection.received) < MAX_HEAD_BYTES:
            self._watch(connection, selectors.EVENT_READ)
            return
        try:
            answer = self._heard(connection, None if end is None else end.start())
        except RequestError as error:
            answer = _error(error.status)
        if isinstance(answer, Answer):
            self._reply(connection, answer)
            self._send(connection)
            return
        connection.stage = _Stage.WAITING
        self._watch(connection, 0)  # the request is complete
        connection.awaited = answer
        answer.add_done_callback(lambda made: self._wake(connection, made))

    def _heard(self, connection: _Connection, length: int | None) -> Answer | Future[Answer]:
        if length is None or length > MAX_HEAD_BYTES:
            raise RequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        request = parse_head(bytes(connection.received[:length]))
        connection.head_only = request.method == "HEAD"
        return self._answer(request)

    def _answer(self, request: Request) -> Answer | Future[Answer]:
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
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR)
        raise RequestError(HTTPStatus.NOT_FOUND)

    def _wake(self, connection: _Connection, made: Future[Answer]) -> None:
        """Wake the loop for a finished future. Called from the thread that completed it."""
        self._made.append((connection, made))
        with self._lock:
            if not self._stopping:
                os.eventfd_write(self._wakeup, 1)

    def _hand_out(self) -> None:
        """Respond to clients whose future is done."""
        os.eventfd_read(self._wakeup)
        while self._made:
            connection, made = self._made.popleft()
            if connection not in self._connections:
                continue  # dropped meanwhile
            try:
                answer = made.result()
            except Exception:  # a bug, as in a synchronous page
                answer = _error(HTTPStatus.INTERNAL_SERVER_ERROR)
            self._reply(connection, answer)
            self._advance(connection)

    @staticmethod
    def _reply(connection: _Connection, answer: Answer) -> None:
        connection.out = _message(answer, head_only=connection.head_only)
        connection.stage = _Stage.TAKING

    def _send(self, connection: _Connection) -> None:
        out = connection.out
        while out:
            if isinstance(connection.sock, ssl.SSLSocket):
                sent = connection.sock.send(out[0][:PROGRESS_BYTES])  # TLS sends all of it, or nothing
            else:
                sent = connection.sock.sendmsg(out)
            connection.taken_bytes += sent
            while out and sent >= len(out[0]):
                sent -= len(out.pop(0))
            if sent:
                out[0] = out[0][sent:]
            if connection.taken_bytes >= PROGRESS_BYTES:
                connection.taken_bytes = 0
                connection.deadline_s = time.monotonic() + self._deadline_s
        # Closing while the client still sends would reset the connection and lose the response: shut down the write
        # side, and read until the client closes.
        if isinstance(connection.sock, ssl.SSLSocket):
            with contextlib.suppress(OSError):
                connection.sock.unwrap()  # close_notify of TLS; its reply is not needed
        connection.sock.shutdown(socket.SHUT_WR)
        connection.stage = _Stage.CLOSING
        self._watch(connection, selectors.EVENT_READ)

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection]
        self._watch(connection, 0)
        with contextlib.suppress(OSError):
            connection.sock.close()
        if connection.awaited is not None:
            connection.awaited.cancel()  # else the worker keeps it, and with it this connection
            connection.awaited = None


def _error(status: HTTPStatus) -> Answer:
    return Answer(status=status, body=f"{status.value} {status.phrase}\n".encode())


def _message(answer: Answer, *, head_only: bool) -> list[memoryview]:
    headers = {
        "Content-Type": answer.content_type,
        "Content-Length": str(len(answer.body)),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "Connection": "close",
    }
    if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = "GET, HEAD"
    elif answer.status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="gpulaunch"'
    elif answer.status is HTTPStatus.NOT_MODIFIED:
        del headers["Content-Length"], headers["Content-Type"]  # of the copy that the client has already
    headers |= answer.headers
    lines = [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"HTTP/1.1 {answer.status.value} {answer.status.phrase}", *lines, "", ""])
    parts = [memoryview(head.encode("ascii"))]
    return parts if head_only or not answer.body else [*parts, memoryview(answer.body)]
