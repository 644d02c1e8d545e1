"""A small HTTP server for a socket that somebody else has bound: one thread, no request can hold up another.

The agent binds the socket and keeps it, so a restarted sidecar has the same port and connections made meanwhile wait
in the backlog. One epoll loop serves all connections; each may send one short head, gets one answer and `DEADLINE_S`
for everything. When `MAX_CONNECTIONS` are open the oldest is dropped for a new one: a scraper that comes now is
served, whoever else sits there.

It answers GET and HEAD and changes nothing. A page in a browser may point a name of its own at this address (DNS
rebinding) and then read what it gets; the name is in the Host header, so only names that belong to this endpoint are
answered.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus

MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 8192
MAX_DISCARDED_BYTES = 1 << 20
DEADLINE_S = 10.0
_PLAIN = "text/plain; charset=utf-8"
_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) ([!-~]+) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a route gives."""

    body: bytes
    content_type: str = _PLAIN
    status: HTTPStatus = HTTPStatus.OK


Route = Callable[[str], Answer]
"""Gives the answer for an Accept header."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The head of a request, as far as it matters here."""

    method: str
    path: str
    host: str | None
    accept: str
    minor: int


class RequestError(Exception):
    """The request gets an error status."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


def parse_head(head: bytes) -> Request:
    """Read the lines before the first empty one.

    Raises:
        RequestError: they are not the head of an HTTP/1 request.
    """
    request_line, *lines = head.replace(b"\r\n", b"\n").split(b"\n")
    match = _REQUEST_LINE.fullmatch(request_line)
    if match is None:
        raise RequestError(HTTPStatus.BAD_REQUEST)
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise RequestError(HTTPStatus.BAD_REQUEST)
        name, value = header[1].decode("ascii").lower(), header[2].decode("latin-1")
        if name == "host" and name in headers:
            raise RequestError(HTTPStatus.BAD_REQUEST)
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    minor = int(match[3])
    if minor and "host" not in headers:
        raise RequestError(HTTPStatus.BAD_REQUEST)
    return Request(
        method=match[1].decode("ascii"),
        path=match[2].decode("ascii").partition("?")[0],
        host=headers.get("host"),
        accept=headers.get("accept", ""),
        minor=minor,
    )


class Doorkeeper:
    """Decides whether a Host header names this endpoint."""

    def __init__(self, bound: str, hostname: str) -> None:
        """Know the names of an endpoint bound to an address (as `getsockname` gives it) on a machine of that name."""
        address = ipaddress.ip_address(bound.partition("%")[0])
        self._any = address.is_unspecified  # bound to all addresses: reached by names we cannot know, and no secret
        self._names = {"localhost"}
        if not address.is_loopback:
            self._names |= {hostname.lower(), hostname.partition(".")[0].lower()} - {""}
        self._address = address

    def admits(self, host: str | None) -> bool:
        """Say whether a request with this Host header may be answered (browsers always send one)."""
        if self._any or host is None:
            return True
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::\d{1,5})?", host)
        if match is None:
            return False
        name = (match[1] or match[2]).lower().removesuffix(".")
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or address == self._address


class _Stage(Enum):
    """What a client is doing; while it is closing it is read on, so that its answer is not reset under it."""

    ASKING = "asking"
    TAKING = "taking"
    CLOSING = "closing"


class _Connection:
    """One client."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self.sock = sock
        self.deadline_s = deadline_s
        self.stage = _Stage.ASKING
        self.received = bytearray()
        self.out: list[memoryview] = []
        self.discarded_bytes = 0


class MetricsServer:
    """Serves routes on a bound, listening socket until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        routes: Mapping[str, Route],
        *,
        hostname: str | None = None,
        deadline_s: float = DEADLINE_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._listener = listener
        self._routes = routes
        self._doorkeeper = Doorkeeper(listener.getsockname()[0], socket.gethostname() if hostname is None else hostname)
        self._deadline_s = deadline_s
        self._max_connections = max_connections
        self._selector = selectors.DefaultSelector()
        self._connections: dict[_Connection, None] = {}  # in the order of their arrival
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)

    def start(self) -> None:
        """Begin to serve, in a thread of its own."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still serves; if not, and nobody has closed it, a fault of ours has ended it."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving and drop all connections; the listening socket stays open (it is not ours). Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        os.close(self._wakeup)

    def _serve(self) -> None:
        while not self._stopping:
            oldest = next(iter(self._connections), None)
            wait_s = None if oldest is None else max(0.0, oldest.deadline_s - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                if key.fileobj is self._listener:
                    self._accept()
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
            self._drop(next(iter(self._connections)))
        sock.setblocking(False)
        connection = _Connection(sock, time.monotonic() + self._deadline_s)
        self._connections[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _advance(self, connection: _Connection) -> None:
        """Do what this client is ready for."""
        try:
            if connection.stage is _Stage.TAKING:
                self._send(connection)
                return
            data = connection.sock.recv(MAX_HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:  # reset by the client: its answer is nobody's any more
            data = b""
        if not data:
            self._drop(connection)
        elif connection.stage is _Stage.ASKING:
            self._hear(connection, data)
        else:
            connection.discarded_bytes += len(data)
            if connection.discarded_bytes > MAX_DISCARDED_BYTES:
                self._drop(connection)

    def _hear(self, connection: _Connection, data: bytes) -> None:
        """Take in more of a request, and begin to answer when its head is complete (or hopeless)."""
        connection.received += data
        end = re.search(rb"\r?\n\r?\n", connection.received)
        if end is None and len(connection.received) < MAX_HEAD_BYTES:
            return
        try:
            if end is None or end.start() > MAX_HEAD_BYTES:
                connection.out = _message(_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), head_only=False)
            else:
                connection.out = self._answer(parse_head(bytes(connection.received[: end.start()])))
        except RequestError as error:
            connection.out = _message(_error(error.status), head_only=False)
        connection.stage = _Stage.TAKING
        self._selector.modify(connection.sock, selectors.EVENT_WRITE, connection)

    def _answer(self, request: Request) -> list[memoryview]:
        head_only = request.method == "HEAD"
        if request.method not in ("GET", "HEAD"):
            return _message(_error(HTTPStatus.METHOD_NOT_ALLOWED), head_only=False)
        if not self._doorkeeper.admits(request.host):
            return _message(_error(HTTPStatus.FORBIDDEN), head_only=head_only)
        route = self._routes.get(request.path)
        if route is None:
            return _message(_error(HTTPStatus.NOT_FOUND), head_only=head_only)
        try:
            answer = route(request.accept)
        except Exception:  # a fault of ours in one page must not end the server
            answer = _error(HTTPStatus.INTERNAL_SERVER_ERROR)
        return _message(answer, head_only=head_only)

    def _send(self, connection: _Connection) -> None:
        while connection.out:
            part = connection.out[0]
            sent = connection.sock.send(part)
            if sent == len(part):
                connection.out.pop(0)
            else:
                connection.out[0] = part[sent:]
        # Closing while the client still sends would reset the connection under its answer: say that this is all, and
        # read on until it closes.
        connection.sock.shutdown(socket.SHUT_WR)
        connection.stage = _Stage.CLOSING
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection]
        self._selector.unregister(connection.sock)
        with contextlib.suppress(OSError):
            connection.sock.close()


def _error(status: HTTPStatus) -> Answer:
    return Answer(status=status, body=f"{status.value} {status.phrase}\n".encode())


def _message(answer: Answer, *, head_only: bool) -> list[memoryview]:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'",
        "Connection: close",
    ]
    if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET, HEAD")
    head = memoryview("".join(f"{line}\r\n" for line in [*lines, ""]).encode("ascii"))
    return [head] if head_only or not answer.body else [head, memoryview(answer.body)]
