"""The last values of a job go to a Pushgateway, and the end of the job does not wait for it.

One is real; what a healthy gateway does not do is done by a stand-in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import re
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families as parse

from gpulaunch.exporters.prometheus.values import Facts, families
from gpulaunch.exporters.push.address import LONGEST_S, complaint_about
from gpulaunch.exporters.push.last import JOB, push
from gpulaunch.profiler.record import NodeState
from needed import program

PAGE = Path(__file__).parents[2] / "docs/prometheus.md"
TOKEN = "0123456789abcdef"


@dataclass
class Gateway:
    """What came: (method, path, body)."""

    url: str
    came: list[tuple[str, str, str]] = field(default_factory=list)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            heard.came.append((self.command, self.path, body))
            self.send_response(500 if "refuse" in self.path else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        heard = Gateway(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield heard
        server.shutdown()
        thread.join()


@pytest.fixture
def pushgateway() -> Iterator[str]:
    """The address of a real one, on a port that nobody has."""
    binary = program("prometheus-pushgateway", "pushgateway", package="prometheus-pushgateway")
    command = [binary, "--web.listen-address=127.0.0.1:0", "--persistence.file="]  # Debian's keeps it for the next
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said: list[str] = []
            for line in process.stderr:
                said.append(line)
                if bound := re.search(r'msg="Listening on" address=(127\.0\.0\.1:\d+)', line):
                    yield f"http://{bound[1]}"
                    break
            else:
                pytest.fail("it never listened:\n" + "".join(said))
        finally:
            process.terminate()


def values(found: Iterable[Metric], **key: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample, by its name and its labels, to which these are added; bounds as numbers: Go writes them shorter."""
    return {
        (
            sample.name,
            frozenset((label, str(float(text)) if label == "le" else text) for label, text in labels.items()),
        ): sample.value
        for family in found
        for sample in family.samples
        if (labels := {**sample.labels, **key})
    }


def test_a_real_gateway_takes_all_of_it_and_keeps_the_last_of_each_node(pushgateway: str, node: NodeState) -> None:
    busy = node.training[0]
    later = dataclasses.replace(node, training=(dataclasses.replace(busy, steps=150), *node.training[1:]))

    for state, host in ((node, "n1"), (node, "n2"), (later, "n1")):
        assert push(state, pushgateway, run="job-7", node=host, version="1.2", longest_s=60.0) == ""

    with urllib.request.urlopen(f"{pushgateway}/metrics", timeout=60) as answer:
        kept = values(parse(answer.read().decode()))
    for state, host in ((later, "n1"), (node, "n2")):
        sent = values(
            families(state, Facts(version="1.2")).collect(), job=JOB, run="job-7", instance=host, name="digits_ddp"
        )
        running = {each for each in sent if each[0] in ("gpulaunch_run_info", "gpulaunch_rank_info")}
        assert len(sent) > 200
        assert running
        assert running.isdisjoint(kept)
        assert {each: kept.get(each) for each in sent if each not in running} == {
            each: value for each, value in sent.items() if each not in running
        }


def told_of(text: str) -> str:
    """A text as UTF-8 can have it."""
    return text.encode(errors="replace").decode()


def test_a_real_gateway_takes_it_whatever_others_write(
    pushgateway: str, with_texts: Callable[[str], NodeState], hostile: str
) -> None:
    """A run, a host and a name are in the address, the rest is in what is sent."""
    state = with_texts(hostile)
    assert push(state, pushgateway, node=hostile, version="1.2", longest_s=60.0) == ""

    with urllib.request.urlopen(f"{pushgateway}/metrics", timeout=60) as answer:
        kept = values(parse(answer.read().decode()))
    whole = with_texts(told_of(hostile))
    key = dict.fromkeys(("run", "instance", "name"), told_of(hostile))
    sent = values(families(whole, Facts(version="1.2")).collect(), job=JOB, **key)
    running = {each for each in sent if each[0] in ("gpulaunch_run_info", "gpulaunch_rank_info")}
    assert len(sent) > 200
    assert {each: kept.get(each) for each in sent if each not in running} == {
        each: value for each, value in sent.items() if each not in running
    }
    ours = {each for each in kept if each[0].startswith("gpulaunch_")}
    assert ours == sent.keys() - running


def test_the_last_values_arrive_under_the_run(gateway: Gateway, node: NodeState) -> None:
    assert push(node, gateway.url, run="job-7", node="n1", version="1.2") == ""

    ((method, path, body),) = gateway.came
    assert (method, path) == ("PUT", f"/metrics/job/{JOB}/instance/n1/name/digits_ddp/run/job-7")
    values = {(sample.name, sample.labels.get("rank")): sample.value for f in parse(body) for sample in f.samples}
    assert values["gpulaunch_steps_total", "0"] == 100
    assert values["gpulaunch_attempt", None] == 1


def test_without_an_id_of_the_user_s_it_is_the_run_s_own_token(gateway: Gateway, node: NodeState) -> None:
    push(node, gateway.url, node="n1", version="1.2")

    assert gateway.came[0][1].endswith(f"/run/{TOKEN}")


def test_what_stays_there_does_not_look_like_a_job_that_runs(gateway: Gateway, node: NodeState) -> None:
    """The alert rules know a running job by its gpulaunch_run_info: see deploy/prometheus/tests/runs.yml."""
    push(node, gateway.url, node="n1", version="1.2")

    names = {sample.name for family in parse(gateway.came[0][2]) for sample in family.samples}
    assert "gpulaunch_goodput_seconds_total" in names
    assert names & {"gpulaunch_run_info", "gpulaunch_rank_info"} == set()


def test_a_gateway_that_refuses_is_one_line(gateway: Gateway, node: NodeState) -> None:
    fault = push(node, f"{gateway.url}/refuse", node="n1", version="1.2")

    assert fault == f"the Pushgateway at {gateway.url.removeprefix('http://')} answered 500 Internal Server Error"


def test_a_job_that_started_nothing_pushes_nothing(gateway: Gateway, empty_node: NodeState) -> None:
    assert push(empty_node, gateway.url, node="n1", version="1.2") == "nothing to push: no rank was started"
    assert gateway.came == []


def test_nobody_there_is_one_line(node: NodeState) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{unused.getsockname()[1]}"
        fault = push(node, f"http://{place}", node="n1", version="1.2")

    assert fault == f"cannot reach the Pushgateway at {place}: Connection refused"


def says_nothing(client: socket.socket, stop: threading.Event) -> None:
    stop.wait()


def drips(client: socket.socket, stop: threading.Event) -> None:
    """A byte at a time: no single wait is long."""
    with contextlib.suppress(OSError):
        for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000:
            client.send(bytes([byte]))
            if stop.wait(0.05):
                return


@pytest.mark.parametrize("manner", [says_nothing, drips])
def test_a_slow_gateway_does_not_hold_up_the_end(
    node: NodeState, manner: Callable[[socket.socket, threading.Event], None]
) -> None:
    """The gateway would take for ever: that push() comes back at all is the proof."""
    stop = threading.Event()

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            manner(client, stop)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            fault = push(node, f"http://{place}", node="n1", version="1.2", longest_s=0.3)
        finally:
            stop.set()
            thread.join()

    assert place in fault
    assert "took more than 0.3 s" in fault or "timed out" in fault
    _wait_for_the_thread()


def _wait_for_the_thread() -> None:
    """What was left behind ends by itself once the gateway is gone; the next test should not meet it."""
    for thread in threading.enumerate():
        if thread.name == "push":
            thread.join(20.0)
            assert not thread.is_alive()


def test_the_page_says_how_long_the_end_may_be_held_up() -> None:
    assert f"- within {LONGEST_S:g} seconds, or not at all" in PAGE.read_text()


@pytest.mark.parametrize("url", ["http://gateway:9091", "https://gateway/prefix", "http://[::1]:9091"])
def test_an_address_is_taken(url: str) -> None:
    assert complaint_about(url) is None


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("gateway:9091", "not an address"),
        ("", "not an address"),
        ("ftp://gateway", "not an address"),
        ("http://gateway:port", "not an address"),
        ("http://user:secret@gateway:9091", "a password in an address"),
        ("http://gateway:9091/?job=x", "none of a Pushgateway"),
    ],
)
def test_what_is_no_address_is_said_before_the_start_without_repeating_a_secret(url: str, why: str) -> None:
    complaint = complaint_about(url)

    assert complaint is not None
    assert why in complaint
    assert "secret" not in complaint
    assert "\n" not in complaint
