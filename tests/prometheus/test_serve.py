"""The endpoint among clients that are slow, rude, or sent by a web page."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.exporters.prometheus.pages import routes
from gpulaunch.exporters.prometheus.render import OPENMETRICS, TEXT, Board
from gpulaunch.exporters.prometheus.serve import Answer, Doorkeeper, MetricsServer, Request, RequestError, parse_head
from gpulaunch.profiler.record import NodeState

WAIT_S = 20.0  # bounds every wait; nothing here takes it unless something is broken


def fault(_: str) -> Answer:
    raise RuntimeError("a fault of ours")


BIG = b"x" * (32 << 20)  # more than the kernel takes at once
ROUTES = {
    "/metrics": lambda accept: Answer(body=f"accept={accept}\n".encode()),
    "/big": lambda _: Answer(body=BIG),
    "/empty": lambda _: Answer(body=b""),
    "/fault": fault,
}

Opener = Callable[..., "Endpoint"]


class Endpoint:
    """A served socket, and raw clients for it."""

    def __init__(self, server: MetricsServer, listener: socket.socket) -> None:
        self.server = server
        self.listener = listener
        self.address = listener.getsockname()[:2]
        self.clients = contextlib.ExitStack()

    def client(self) -> socket.socket:
        return self.clients.enter_context(socket.create_connection(self.address, timeout=WAIT_S))

    def say(self, data: bytes) -> bytes:
        client = self.client()
        client.sendall(data)
        return everything(client)

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=WAIT_S)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response, response.read()


def everything(client: socket.socket) -> bytes:
    """All bytes until the server closes."""
    parts: list[bytes] = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.fixture
def serve() -> Iterator[Opener]:
    with contextlib.ExitStack() as stack:

        def start(address: str = "127.0.0.1", **limits: float) -> Endpoint:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = stack.enter_context(socket.create_server((address, 0), family=family))
            server = MetricsServer(listener, ROUTES, hostname="node7.cluster", **limits)  # type: ignore[arg-type]
            endpoint = Endpoint(server, listener)
            server.start()
            stack.callback(server.close)
            stack.callback(endpoint.clients.close)
            return endpoint

        yield start


def test_get_and_head_are_answered(serve: Opener) -> None:
    endpoint = serve()
    response, body = endpoint.get("/metrics?ignored=1", accept="text/plain")
    assert (response.status, body) == (200, b"accept=text/plain\n")
    assert response.headers["Connection"] == "close"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Access-Control-Allow-Origin"] is None

    response, body = endpoint.get("/metrics", method="HEAD", accept="text/plain")
    assert (response.status, response.headers["Content-Length"], body) == (200, "18", b"")
    response, body = endpoint.get("/empty")
    assert (response.status, body) == (200, b"")


def test_a_big_answer_arrives_whole(serve: Opener) -> None:
    _, body = serve().get("/big")
    assert body == BIG


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_but_reading_is_possible(serve: Opener, method: str) -> None:
    response, _ = serve().get("/metrics", method=method)
    assert response.status == 405
    assert response.headers["Allow"] == "GET, HEAD"


def test_a_refused_body_does_not_reset_the_answer(serve: Opener) -> None:
    answer = serve().say(
        b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500000\r\n\r\n" + b"x" * 500_000
    )
    assert answer.startswith(b"HTTP/1.1 405 ")


def test_unknown_paths_are_not_found_and_faults_are_ours(serve: Opener) -> None:
    endpoint = serve()
    assert endpoint.get("/../etc/passwd")[0].status == 404
    response, body = endpoint.get("/fault")
    assert (response.status, body) == (500, b"500 Internal Server Error\n")
    assert endpoint.get("/metrics")[0].status == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n folded: x\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /" + b"a" * 9000, 431),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\nHost: localhost\n\n", 200),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n", 200),
    ],
)
def test_garbage_gets_its_status_and_the_next_client_its_answer(
    serve: Opener, request_bytes: bytes, status: int
) -> None:
    endpoint = serve()
    answer = endpoint.say(request_bytes)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert endpoint.get("/metrics")[0].status == 200


@given(st.binary(max_size=300) | st.binary(max_size=200).map(lambda rest: b"GET / HTTP/1.1\r\nHost: a\r\n" + rest))
def test_a_head_is_read_or_refused(head: bytes) -> None:
    try:
        request = parse_head(head)
    except RequestError:
        return
    assert isinstance(request, Request)
    assert request.path.isprintable()


def test_clients_that_say_nothing_do_not_hold_up_others(serve: Opener) -> None:
    """More of them than the server will hold, some in the middle of a word."""
    endpoint = serve(max_connections=8)
    idle = [endpoint.client() for _ in range(20)]
    for client in idle[::2]:
        with contextlib.suppress(OSError):  # the server may have dropped it already
            client.sendall(b"GET /metrics HT")
    for _ in range(5):
        assert endpoint.get("/metrics")[0].status == 200
    assert idle[0].recv(1) == b""  # the oldest has been dropped, without an answer


def test_a_slow_client_is_dropped_at_its_deadline_however_it_drips(serve: Opener) -> None:
    endpoint = serve(deadline_s=0.5)
    client = endpoint.client()
    stop = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.05):
                client.send(b"G")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    finally:
        stop.set()
        thread.join()


def test_a_client_that_does_not_take_its_answer_is_dropped(serve: Opener) -> None:
    endpoint = serve(deadline_s=0.5)
    client = endpoint.client()
    client.sendall(b"GET /big HTTP/1.0\r\n\r\n")
    assert endpoint.get("/metrics")[0].status == 200  # meanwhile others are served
    fresh = endpoint.client()
    fresh.sendall(b"G")
    with contextlib.suppress(ConnectionResetError):
        assert fresh.recv(1) == b""  # the younger one's deadline is over, so the older one's is
    received = b""
    with contextlib.suppress(ConnectionResetError):
        received = everything(client)
    assert len(received) < len(BIG)


def test_a_client_that_leaves_at_once_is_no_trouble(serve: Opener) -> None:
    endpoint = serve()
    for linger in (b"\0" * 8, b"\1\0\0\0\0\0\0\0"):  # close politely, close with a reset
        for data in (b"", b"GET /big HTTP/1.0\r\n\r\n"):
            client = endpoint.client()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            client.sendall(data)
            client.close()
    assert endpoint.get("/metrics")[0].status == 200


def test_many_scrapers_at_once_are_all_served(serve: Opener) -> None:
    endpoint = serve()
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(endpoint.get("/metrics")[0].status)) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 32


def test_the_socket_outlives_the_server(serve: Opener) -> None:
    """A client that comes while the sidecar is being restarted waits in the backlog."""
    endpoint = serve()
    assert endpoint.server.alive
    endpoint.server.close()
    assert not endpoint.server.alive
    waiting = endpoint.client()
    waiting.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    successor = MetricsServer(endpoint.listener, ROUTES)
    successor.start()
    try:
        assert everything(waiting).startswith(b"HTTP/1.1 200 ")
    finally:
        successor.close()


LOOPBACK = Doorkeeper("127.0.0.1", "node7.cluster")
LOOPBACK6 = Doorkeeper("::1", "node7.cluster")
PRIVATE = Doorkeeper("10.1.2.3", "node7.cluster")
WILDCARD = Doorkeeper("0.0.0.0", "node7.cluster")
WILDCARD6 = Doorkeeper("::", "node7.cluster")


@pytest.mark.parametrize(
    ("doorkeeper", "host", "admitted"),
    [
        (LOOPBACK, "127.0.0.1:9464", True),
        (LOOPBACK, "127.0.0.1", True),
        (LOOPBACK, "localhost:9464", True),
        (LOOPBACK, "LOCALHOST.", True),
        (LOOPBACK, "localhost:8080", True),  # the local end of an ssh tunnel has a port of its own
        (LOOPBACK, "[::1]:9464", True),
        (LOOPBACK, "evil.example", False),
        (LOOPBACK, "evil.example:9464", False),
        (LOOPBACK, "localhost.evil.example", False),
        (LOOPBACK, "127.0.0.1.evil.example", False),
        (LOOPBACK, "10.1.2.3:9464", False),
        (LOOPBACK, "node7.cluster", False),
        (LOOPBACK, "", False),
        (LOOPBACK, "localhost,evil.example", False),
        (LOOPBACK, "user@localhost", False),
        (LOOPBACK, "localhost:x", False),
        (LOOPBACK, "[::1", False),
        (LOOPBACK6, "[::1]:9464", True),
        (LOOPBACK6, "evil.example", False),
        (PRIVATE, "10.1.2.3:9464", True),
        (PRIVATE, "node7.cluster:9464", True),
        (PRIVATE, "NODE7:9464", True),
        (PRIVATE, "localhost", True),
        (PRIVATE, "node7.evil.example", False),
        (PRIVATE, "10.1.2.4", False),
        (WILDCARD, "anything.example", True),
        (WILDCARD6, "anything.example", True),
    ],
)
def test_only_our_own_names_are_answered(doorkeeper: Doorkeeper, host: str, admitted: bool) -> None:
    assert doorkeeper.admits(host) == admitted


def test_a_request_without_a_host_is_not_from_a_browser() -> None:
    assert LOOPBACK.admits(None)


def test_a_web_page_that_points_its_own_name_here_learns_nothing(serve: Opener) -> None:
    response, body = serve().get("/metrics", host="evil.example")
    assert (response.status, body) == (403, b"403 Forbidden\n")


def test_a_wildcard_endpoint_is_reached_by_any_name(serve: Opener) -> None:
    endpoint = serve("::1")
    assert endpoint.get("/metrics", host=f"[::1]:{endpoint.address[1]}")[0].status == 200


def test_the_pages_over_a_board(node: NodeState) -> None:
    now_s = 6.0
    board = Board(version="1")
    pages = routes(board, stale_s=10.0, clock=lambda: now_s)
    assert pages["/healthz"]("").status is HTTPStatus.SERVICE_UNAVAILABLE
    assert b"no run yet" in pages["/"]("").body

    board.publish(node)
    assert pages["/healthz"]("") == Answer(body=b"ok\n")
    assert pages["/metrics"]("").content_type == TEXT
    assert pages["/metrics"]("application/openmetrics-text").content_type == OPENMETRICS
    index = pages["/"]("").body
    assert b"digits_ddp" in index
    assert b"&lt;Permission denied&gt;" in index
    assert b"<Permission" not in index

    now_s = 60.0
    health = pages["/healthz"]("")
    assert (health.status, health.body) == (HTTPStatus.SERVICE_UNAVAILABLE, b"stale: last refresh 54 s ago\n")
