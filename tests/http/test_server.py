"""The endpoint among clients that are slow, rude, or sent by a web page."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.exporters.http import (
    HttpServer,
    Request,
    RequestError,
    RequestGuard,
    Response,
    holds_token,
    parse_head,
    same_origin,
)
from needed import program

WAIT_S = 20.0  # bounds every wait; nothing here takes it unless something is broken


def fault(_: Request) -> Response:
    raise RuntimeError("a fault of ours")


BIG = b"x" * (32 << 20)  # more than the kernel takes at once
ROUTES = {
    "/metrics": lambda request: Response(body=f"accept={request.accept}\n".encode()),
    "/big": lambda _: Response(body=BIG),
    "/empty": lambda _: Response(body=b""),
    "/fault": fault,
}

Opener = Callable[..., "Endpoint"]


class Endpoint:
    """A served socket, and raw clients for it."""

    def __init__(self, server: HttpServer, listener: socket.socket) -> None:
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

    def get(
        self, path: str, method: str = "GET", tls: ssl.SSLContext | None = None, **headers: str
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=WAIT_S)
        if tls is not None:
            connection = http.client.HTTPSConnection(*self.address, timeout=WAIT_S, context=tls)
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

        def start(address: str = "127.0.0.1", **more: object) -> Endpoint:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = stack.enter_context(socket.create_server((address, 0), family=family))
            server = HttpServer(listener, ROUTES, hostname="node7.cluster", **more)  # type: ignore[arg-type]
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


def test_a_head_of_spaces_costs_what_one_of_letters_costs() -> None:
    """Clients share one thread: who needs no token to hold it up for half a second a request holds up them all."""

    def cpu_s(middle: bytes) -> float:
        head = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: \t a" + middle + b"b \t"
        spent: list[float] = []
        for _ in range(5):
            began_s = time.thread_time()
            request = parse_head(head)
            spent.append(time.thread_time() - began_s)
            assert request.headers["x"] == f"a{middle.decode()}b"
        return min(spent)

    assert cpu_s(b" " * 8000) < 200 * cpu_s(b"x" * 8000)  # it took thousands of times as long


def test_clients_that_say_nothing_do_not_hold_up_others(serve: Opener) -> None:
    """More of them than the server will hold, some in the middle of a word."""
    endpoint = serve(max_connections=8)
    idle = [endpoint.client() for _ in range(20)]
    for client in idle[::2]:
        with contextlib.suppress(OSError):  # the server may have dropped it already
            client.sendall(b"GET /metrics HT")
    for _ in range(5):
        assert endpoint.get("/metrics")[0].status == 200
    with contextlib.suppress(ConnectionResetError):  # where it had said something
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


FEW_DESCRIPTORS = """
import os, resource, socket, sys
from gpulaunch.exporters.http import HttpServer, Response
listener = socket.create_server(("127.0.0.1", 0), backlog=100)
server = HttpServer(listener, {"/metrics": lambda _: Response(body=b"here")})
server.start()
few = len(os.listdir("/proc/self/fd")) + 8
resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
server.close()
"""


def test_without_a_free_descriptor_the_oldest_make_room_for_the_newest() -> None:
    argv = [sys.executable, "-c", FEW_DESCRIPTORS]
    with (
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as clients,
    ):
        assert process.stdout is not None
        address = "127.0.0.1", int(process.stdout.readline())
        for _ in range(30):
            clients.enter_context(socket.create_connection(address, timeout=WAIT_S))
        last = clients.enter_context(socket.create_connection(address, timeout=WAIT_S))
        last.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert everything(last).endswith(b"\r\n\r\nhere")
        process.communicate()
    assert process.returncode == 0


def test_the_socket_outlives_the_server(serve: Opener) -> None:
    """A client that comes while the sidecar is being restarted waits in the backlog."""
    endpoint = serve()
    assert endpoint.server.alive
    endpoint.server.close()
    assert not endpoint.server.alive
    waiting = endpoint.client()
    waiting.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    successor = HttpServer(endpoint.listener, ROUTES)
    successor.start()
    try:
        assert everything(waiting).startswith(b"HTTP/1.1 200 ")
    finally:
        successor.close()


LOOPBACK = RequestGuard("127.0.0.1", "node7.cluster")
LOOPBACK6 = RequestGuard("::1", "node7.cluster")
PRIVATE = RequestGuard("10.1.2.3", "node7.cluster")
WILDCARD = RequestGuard("0.0.0.0", "node7.cluster")
WILDCARD6 = RequestGuard("::", "node7.cluster")


@pytest.mark.parametrize(
    ("guard", "host", "admitted"),
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
def test_only_our_own_names_are_answered(guard: RequestGuard, host: str, admitted: bool) -> None:
    assert guard.admits(host) == admitted


def test_a_request_without_a_host_is_not_from_a_browser() -> None:
    assert LOOPBACK.admits(None)


def test_a_web_page_that_points_its_own_name_here_learns_nothing(serve: Opener) -> None:
    response, body = serve().get("/metrics", host="evil.example")
    assert (response.status, body) == (403, b"403 Forbidden\n")


def test_an_endpoint_for_all_addresses_gives_metrics_by_any_name_and_nothing_else(serve: Opener) -> None:
    """Why a collector does not deliver is not for a web page that points a name of its own here."""
    endpoint = serve("0.0.0.0", pages={"/": lambda _: Response(body=b"the run")})
    for path in ("/empty", "/", "/nowhere"):
        assert endpoint.get(path, host="evil.example")[0].status == 403, path
    assert endpoint.get("/metrics", host="evil.example")[0].status == 200
    assert endpoint.get("/empty", host="node7.cluster")[0].status == 200
    assert endpoint.get("/empty", host="127.0.0.1")[0].status == 200


def test_a_wildcard_endpoint_is_reached_by_any_name(serve: Opener) -> None:
    endpoint = serve("::1")
    assert endpoint.get("/metrics", host=f"[::1]:{endpoint.address[1]}")[0].status == 200


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        (None, "localhost:9464", True),
        ("http://localhost:9464", "localhost:9464", True),
        ("https://LOCALHOST:9464", "localhost:9464", True),
        ("http://localhost:8000", "localhost:9464", False),
        ("http://evil.example", "localhost:9464", False),
        ("null", "localhost:9464", False),
        ("http://localhost:9464", None, False),
    ],
)
def test_a_page_that_came_from_elsewhere_is_known_by_its_origin(origin: str | None, host: str, same: bool) -> None:
    assert same_origin(origin, host) == same


def test_a_page_that_came_from_elsewhere_learns_nothing(serve: Opener) -> None:
    endpoint = serve()
    assert endpoint.get("/metrics", origin="http://evil.example")[0].status == 403
    host, port = endpoint.address
    assert endpoint.get("/metrics", origin=f"http://{host}:{port}")[0].status == 200


TOKEN = "0123456789abcdef"


@pytest.mark.parametrize(
    ("authorization", "holds"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer  {TOKEN} ", True),
        ("", False),
        ("Bearer", False),
        (f"Basic {TOKEN}", False),
        (TOKEN, False),
        (f"Bearer {TOKEN[:-1]}", False),
        (f"Bearer {TOKEN}x", False),
        (f"Bearer {TOKEN}\xe9", False),
        (f"Bearer {TOKEN},Bearer {TOKEN}", False),
    ],
)
def test_a_token_is_the_whole_token(authorization: str, holds: bool) -> None:
    assert holds_token(authorization, TOKEN) == holds


def test_with_a_token_everything_else_is_refused_before_it_is_looked_for(serve: Opener) -> None:
    endpoint = serve(token=TOKEN, public={"/empty"})
    for path in ("/metrics", "/nowhere", "/fault"):
        response, body = endpoint.get(path)
        assert (response.status, body) == (401, b"401 Unauthorized\n")
    assert endpoint.get("/empty")[0].status == 200
    assert endpoint.get("/metrics", authorization=f"Bearer {TOKEN}")[0].status == 200
    assert endpoint.get("/nowhere", authorization=f"Bearer {TOKEN}")[0].status == 404


def test_a_page_may_answer_later_and_nobody_else_waits_for_it(serve: Opener) -> None:
    made: list[Future[Response]] = []

    def later(_: Request) -> Future[Response]:
        made.append(Future())
        return made[-1]

    endpoint = serve(pages={"/later": later})
    waiting = [endpoint.client() for _ in range(3)]
    for heard, client in enumerate(waiting, 1):  # one after the other: of several at once, any may be heard first
        client.sendall(b"GET /later HTTP/1.0\r\n\r\n")
        while len(made) < heard:  # each was heard by the time that its future is there
            assert endpoint.get("/metrics")[0].status == 200
    assert endpoint.get("/metrics")[0].status == 200
    made[1].set_result(Response(body=b"second", headers={"ETag": '"2"', "Cache-Control": "no-cache"}))
    made[0].set_exception(RuntimeError("a fault of ours"))
    made[2].set_result(Response(body=b"third"))
    first, second, third = map(everything, waiting)
    assert first.startswith(b"HTTP/1.1 500 ")
    assert second.endswith(b"\r\n\r\nsecond")
    assert b'ETag: "2"\r\n' in second
    assert second.count(b"Cache-Control") == 1
    assert third.endswith(b"\r\n\r\nthird")


def test_an_answer_that_never_comes_does_not_hold_its_client_for_ever(serve: Opener) -> None:
    late: Future[Response] = Future()
    late.set_running_or_notify_cancel()
    endpoint = serve(pages={"/never": lambda _: late}, deadline_s=0.5)
    client = endpoint.client()
    client.sendall(b"GET /never HTTP/1.0\r\n\r\n")
    assert client.recv(1) == b""
    late.set_result(Response(body=b"too late"))
    assert endpoint.get("/metrics")[0].status == 200


def test_what_nobody_waits_for_any_more_is_cancelled(serve: Opener) -> None:
    """Whoever makes it keeps a list of who waits, and nobody else can tell it who has left."""
    made: list[Future[Response]] = []
    heard = threading.Semaphore(0)

    def later(_: Request) -> Future[Response]:
        made.append(Future())
        heard.release()
        return made[-1]

    endpoint = serve(pages={"/later": later}, max_connections=3)
    clients: list[socket.socket] = []
    for number in range(1, 8):
        clients.append(endpoint.client())
        clients[-1].sendall(b"GET /later HTTP/1.0\r\n\r\n")
        assert heard.acquire(timeout=WAIT_S)
        assert [each.cancelled() for each in made] == [True] * (number - 3) + [False] * min(number, 3)
    made[-1].set_result(Response(body=b"the last"))
    assert everything(clients[-1]).endswith(b"\r\n\r\nthe last")
    endpoint.server.close()
    assert [each.cancelled() for each in made] == [True] * 6 + [False]


def test_an_answer_that_comes_after_the_end_wakes_nobody(serve: Opener) -> None:
    late: Future[Response] = Future()
    late.set_running_or_notify_cancel()
    endpoint = serve(pages={"/later": lambda _: late})
    client = endpoint.client()
    client.sendall(b"GET /later HTTP/1.0\r\n\r\n")
    endpoint.get("/metrics")
    endpoint.server.close()
    late.set_result(Response(body=b"too late"))
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(1) == b""


def test_who_takes_a_long_answer_slowly_but_steadily_gets_all_of_it(serve: Opener) -> None:
    """A chart library over a slow line: longer in all than the deadline for what makes no progress."""
    endpoint = serve(deadline_s=1.0)
    client = endpoint.client()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    client.sendall(b"GET /big HTTP/1.0\r\n\r\n")
    began_s, received = time.monotonic(), 0
    pause = threading.Event()
    while part := client.recv(1 << 20):
        received += len(part)
        if time.monotonic() - began_s < 2.5:
            pause.wait(0.02)
    assert received > len(BIG)
    assert time.monotonic() - began_s > 1.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """For this machine, by nobody."""
    program("openssl", package="openssl")
    folder = tmp_path_factory.mktemp("tls")
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv += ["-keyout", "server.key", "-out", "server.crt", "-days", "2", "-subj", "/CN=localhost"]
    argv += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(argv, cwd=folder, check=True, capture_output=True)
    return folder / "server.crt", folder / "server.key"


@pytest.fixture
def contexts(certificate: tuple[Path, Path]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's, and one of a client that trusts it."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*certificate)
    return server, ssl.create_default_context(cafile=str(certificate[0]))


def test_with_a_certificate_it_speaks_tls_and_nothing_else(
    serve: Opener, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    server, client = contexts
    endpoint = serve(tls=server)
    response, body = endpoint.get("/metrics", tls=client, accept="text/plain")
    assert (response.status, body) == (200, b"accept=text/plain\n")
    assert endpoint.get("/big", tls=client)[1] == BIG
    with contextlib.suppress(ConnectionResetError):
        assert b"200" not in endpoint.say(b"GET /metrics HTTP/1.0\r\n\r\n")
    with pytest.raises(ssl.SSLCertVerificationError):
        endpoint.get("/metrics", tls=ssl.create_default_context())
    assert endpoint.get("/metrics", tls=client)[0].status == 200


def test_a_head_in_many_records_and_one_that_ends_too_early_over_tls(
    serve: Opener, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    server, trusting = contexts
    endpoint = serve(tls=server)
    with trusting.wrap_socket(endpoint.client(), server_hostname="localhost") as client:
        for byte in b"GET /metrics HTTP/1.0\r\n\r\n":
            client.sendall(bytes([byte]))
        assert everything(client).startswith(b"HTTP/1.1 200 ")
    with trusting.wrap_socket(endpoint.client(), server_hostname="localhost") as client:
        client.sendall(b"GET /" + b"a" * 16000)
        assert everything(client).startswith(b"HTTP/1.1 431 ")
    with trusting.wrap_socket(endpoint.client(), server_hostname="localhost") as client:
        client.sendall(b"GET /met")
    assert endpoint.get("/metrics", tls=trusting)[0].status == 200


def test_clients_that_never_greet_hold_nobody_up(
    serve: Opener, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    server, trusting = contexts
    endpoint = serve(tls=server, deadline_s=0.5)
    idle = [endpoint.client() for _ in range(10)]
    idle[0].sendall(b"\x16\x03\x01")
    assert endpoint.get("/metrics", tls=trusting)[0].status == 200
    for client in idle:
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_who_has_had_an_answer_is_dropped_before_who_waits_for_one(serve: Opener) -> None:
    """Scrapers that are slow to close do not cost another its answer."""
    later: Future[Response] = Future()
    endpoint = serve(pages={"/later": lambda _: later}, max_connections=3)
    waiting = endpoint.client()
    waiting.sendall(b"GET /later HTTP/1.0\r\n\r\n")
    for _ in range(5):
        assert endpoint.say(b"GET /metrics HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")  # and keeps its end open
    later.set_result(Response(body=b"in the end"))
    assert everything(waiting).endswith(b"\r\n\r\nin the end")
