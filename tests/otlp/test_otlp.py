"""The catalogue over OTLP: a listener decodes with OpenTelemetry's own protobuf what the library's exporter has sent.

The collector is a stand-in: it understands the protocol, and stores nothing.
"""

from __future__ import annotations

import dataclasses
import http.server
import logging
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from gpulaunch.exporters.otlp.extra import complaint_about, endpoint, missing
from gpulaunch.exporters.otlp.points import UNITS
from gpulaunch.exporters.otlp.sender import Sender
from gpulaunch.exporters.prometheus.catalogue import CATALOGUE
from gpulaunch.exporters.prometheus.metrics.metric import Kind
from gpulaunch.exporters.prometheus.values import Facts, families
from gpulaunch.profiler.record import NodeState

WAIT_S = 20.0  # bounds every wait; nothing here takes it unless something is broken
CUMULATIVE = 2  # AGGREGATION_TEMPORALITY_CUMULATIVE of metrics.proto


@dataclass
class Collector:
    """What came: (path, headers, message)."""

    url: str
    status: int = 200
    came: list[tuple[str, dict[str, str], ExportMetricsServiceRequest]] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, num_messages: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.came) >= num_messages, WAIT_S)


@pytest.fixture
def collector() -> Iterator[Collector]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = ExportMetricsServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            with heard.arrived:
                heard.came.append((self.path, {key.lower(): value for key, value in self.headers.items()}, message))
                heard.arrived.notify_all()
            self.send_response(heard.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        heard = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield heard
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """The sender takes over the library's logger in its process; here that is pytest's."""
    logger = logging.getLogger("opentelemetry")
    before = logger.handlers[:], logger.propagate
    yield
    logger.handlers[:], logger.propagate = before


@pytest.fixture
def sender(collector: Collector) -> Iterator[Callable[..., Sender]]:
    started: list[Sender] = []

    def start(**changed: Any) -> Sender:
        usual: dict[str, Any] = {"url": collector.url, "node": "n1", "version": "1.2", "interval_s": 0.02}
        new = Sender(**{**usual, **changed})
        new.start()
        started.append(new)
        return new

    yield start
    for each in started:
        each.close(WAIT_S)


def attributes(pairs: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in pairs if isinstance(pair, KeyValue)}


def points(message: ExportMetricsServiceRequest, name: str) -> list[Any]:
    (metric,) = [
        metric for r in message.resource_metrics for s in r.scope_metrics for metric in s.metrics if metric.name == name
    ]
    return list(getattr(metric, metric.WhichOneof("data")).data_points)


def test_a_state_arrives_whole(collector: Collector, sender: Callable[..., Sender], node: NodeState) -> None:
    """Every series of the Prometheus page, by the same name, with the same labels and the same value."""
    sender().publish(node)
    collector.wait_for(1)

    path, headers, message = collector.came[0]
    (resource,) = message.resource_metrics
    (scope,) = resource.scope_metrics
    assert path == "/v1/metrics"
    assert headers["content-type"] == "application/x-protobuf"
    assert (scope.scope.name, scope.scope.version) == ("gpulaunch", "1.2")

    sent = {
        (metric.name, frozenset(attributes(point.attributes).items())): point.as_double
        for metric in scope.metrics
        if metric.WhichOneof("data") != "histogram"
        for point in getattr(metric, metric.WhichOneof("data")).data_points
    }
    shown = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families(node, Facts(version="1.2")).collect()
        if family.type != "histogram"
        for sample in family.samples
    }
    assert len(shown) > 100
    assert sent == shown


def told_of(text: str) -> str:
    """A text as UTF-8 can have it."""
    return text.encode(errors="replace").decode()


def test_a_state_arrives_whole_whatever_others_write(
    collector: Collector, sender: Callable[..., Sender], with_texts: Callable[[str], NodeState], hostile: str
) -> None:
    one = sender(node=hostile)
    one.publish(with_texts(hostile))
    one.close(WAIT_S)

    assert one.fault == ""
    (resource,) = collector.came[0][2].resource_metrics
    said = attributes(resource.resource.attributes)
    text = told_of(hostile)
    assert (said["gpulaunch.run"], said["gpulaunch.name"], said["host.name"]) == (text, text, text)
    assert said["service.instance.id"] == f"{text}/{text}"
    (scope,) = resource.scope_metrics
    sent = {
        (metric.name, frozenset(attributes(point.attributes).items()))
        for metric in scope.metrics
        if metric.WhichOneof("data") != "histogram"
        for point in getattr(metric, metric.WhichOneof("data")).data_points
    }
    shown = {
        (sample.name, frozenset(sample.labels.items()))
        for family in families(with_texts(text), Facts(version="1.2")).collect()
        if family.type != "histogram"
        for sample in family.samples
    }
    assert len(shown) > 150
    assert sent == shown


def test_each_metric_is_of_its_kind_and_in_its_unit(
    collector: Collector, sender: Callable[..., Sender], node: NodeState
) -> None:
    sender().publish(node)
    collector.wait_for(1)

    rows = {row.name: row for row in CATALOGUE}
    metrics = collector.came[0][2].resource_metrics[0].scope_metrics[0].metrics
    assert {rows[metric.name].kind for metric in metrics} == set(Kind)
    for metric in metrics:
        row, form = rows[metric.name], metric.WhichOneof("data")
        assert form == {Kind.COUNTER: "sum", Kind.HISTOGRAM: "histogram"}.get(row.kind, "gauge")
        assert (metric.unit, metric.description) == (UNITS[row.unit], row.help)
        if form == "sum":
            assert metric.sum.is_monotonic
            assert metric.sum.aggregation_temporality == CUMULATIVE
            assert {point.start_time_unix_nano for point in metric.sum.data_points} == {0}


def test_the_catalogue_has_no_unit_that_otlp_does_not() -> None:
    assert {row.unit for row in CATALOGUE} <= set(UNITS)


def test_a_histogram_counts_what_is_between_its_bounds(
    collector: Collector, sender: Callable[..., Sender], node: NodeState
) -> None:
    sender().publish(node)
    collector.wait_for(1)

    by_rank = {
        attributes(p.attributes)["rank"]: p for p in points(collector.came[0][2], "gpulaunch_step_duration_seconds")
    }
    busy, idle = node.training
    point = by_rank["0"]
    assert tuple(point.bucket_counts) == busy.step_counts
    assert tuple(point.explicit_bounds) == pytest.approx(busy.step_bounds_s)
    assert (point.count, point.sum) == (100, 130.0)
    assert not point.HasField("min")
    assert not point.HasField("max")
    assert by_rank["1"].count == sum(idle.step_counts) == 0


def test_it_says_who_sends(
    collector: Collector, sender: Callable[..., Sender], node: NodeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision")
    sender(run="job-7").publish(node)
    collector.wait_for(1)

    said = attributes(collector.came[0][2].resource_metrics[0].resource.attributes)
    assert said["service.name"] == "gpulaunch"
    assert said["service.instance.id"] == "n1/0123456789abcdef"
    assert (said["gpulaunch.run"], said["gpulaunch.name"], said["host.name"]) == ("job-7", "digits_ddp", "n1")
    assert said["team"] == "vision"


def test_a_secret_goes_by_the_library_s_variable(
    collector: Collector, sender: Callable[..., Sender], node: NodeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cret")
    sender().publish(node)
    collector.wait_for(1)

    _, headers, message = collector.came[0]
    assert headers["authorization"] == "Bearer s3cret"
    assert b"s3cret" not in message.SerializeToString()


def test_the_newest_state_is_sent_and_the_last_one_at_the_end(
    collector: Collector, sender: Callable[..., Sender], node: NodeState
) -> None:
    """With an interval longer than the job, nothing but the last message goes out."""
    one = sender(interval_s=3600.0)
    one.publish(node)
    one.publish(dataclasses.replace(node, taken_wall_ns=node.taken_wall_ns + 1_000_000_000))
    one.close(WAIT_S)

    ((_, _, message),) = collector.came
    (point,) = points(message, "gpulaunch_attempt")
    assert point.time_unix_nano == node.taken_wall_ns + 1_000_000_000
    assert (one.num_sent, one.num_failed, one.fault) == (1, 0, "")


def test_nothing_is_sent_before_a_run_nor_twice(
    collector: Collector, sender: Callable[..., Sender], node: NodeState, empty_node: NodeState
) -> None:
    one = sender(interval_s=0.01)
    one.publish(empty_node)
    one.publish(node)
    collector.wait_for(1)
    one.close(WAIT_S)

    assert len(collector.came) == one.num_sent == 1


def test_a_collector_that_refuses_is_told_once_until_it_takes_again(
    collector: Collector, sender: Callable[..., Sender], node: NodeState
) -> None:
    faults: list[str] = []
    collector.status = 403
    one = sender(on_fault=faults.append)
    for tick in range(3):
        one.publish(dataclasses.replace(node, taken_wall_ns=tick))
        collector.wait_for(tick + 1)
    collector.status = 200
    one.publish(node)
    one.close(WAIT_S)

    assert len(faults) == 1
    assert faults[0].startswith(f"cannot send metrics to {collector.url}/v1/metrics: ")
    assert "403" in faults[0]
    assert "\n" not in faults[0]
    assert one.num_failed >= 3
    assert (one.num_sent, one.fault) == (1, "")


def test_nobody_there_does_not_hold_up_the_end(sender: Callable[..., Sender], node: NodeState) -> None:
    """The library would try again for an hour; that close() comes back is the proof."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        one = sender(url=f"http://127.0.0.1:{unused.getsockname()[1]}", interval_s=3600.0, timeout_s=3600.0)
        one.publish(node)
        one.close(0.3)

    for thread in threading.enumerate():
        if thread.name == "otlp":
            thread.join(WAIT_S)
            assert not thread.is_alive()
    assert one.num_sent == 0
    assert "refused" in one.fault


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://collector:4318", "http://collector:4318/v1/metrics"),
        ("http://collector:4318/", "http://collector:4318/v1/metrics"),
        ("https://prometheus/api/v1/otlp/v1/metrics", "https://prometheus/api/v1/otlp/v1/metrics"),
    ],
)
def test_the_usual_path_is_added_where_there_is_none(url: str, path: str) -> None:
    assert complaint_about(url) is None
    assert endpoint(url) == path


@pytest.mark.parametrize("url", ["collector:4318", "", "http://c:port", "grpc://c", "http://me:s3cret@collector"])
def test_what_is_no_address_is_said_before_the_start(url: str) -> None:
    complaint = complaint_about(url)

    assert complaint is not None
    assert "s3cret" not in complaint
    assert "\n" not in complaint


def test_the_extra_is_there() -> None:
    assert missing() is None


@pytest.mark.parametrize("there", [(), ("sdk/metrics/export",), ("exporter/otlp/proto/http/metric_exporter",)])
def test_without_the_extra_it_is_one_line(there: tuple[str, ...], tmp_path: Path) -> None:
    for folder in there:
        (tmp_path / "opentelemetry" / folder).mkdir(parents=True)
        (tmp_path / "opentelemetry" / folder / "__init__.py").touch()

    complaint = missing([str(tmp_path)])

    assert complaint is not None
    assert complaint.endswith(" is not installed; pip install 'gpulaunch[otlp]'")
    assert "\n" not in complaint


def test_to_ask_for_the_extra_imports_none_of_it() -> None:
    program = "import sys\nfrom gpulaunch.exporters.otlp.extra import missing\nmissing()\nprint(*list(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    loaded = done.stdout.split()
    assert "gpulaunch.exporters.otlp.extra" in loaded
    assert [name for name in loaded if name.startswith(("opentelemetry", "requests"))] == []


def test_troubles_of_the_library_are_not_printed() -> None:
    """The sidecar writes to the user's terminal: a collector that is down must not fill it."""
    program = """
import dataclasses, socket
from gpulaunch.exporters.otlp.sender import Sender
from gpulaunch.profiler.record import AttemptGroup, NodeState, SidecarState
state = NodeState(taken_monotonic_ns=0, taken_wall_ns=1, training=(), processes=(), host=None, run=None, gpus=(),
    group=AttemptGroup(run_id="a", name="b", attempt=0, world_size=1, node_rank=0, ranks=()), collectors={},
    sidecar=SidecarState(cpu_s=0.1, rss_bytes=None, refreshes=0, late_refreshes=0, refresh_s=0.0))
with socket.socket() as unused:
    unused.bind(("127.0.0.1", 0))
    sender = Sender(f"http://127.0.0.1:{unused.getsockname()[1]}", node="n", version="1", timeout_s=2.5)
    sender.start()
    sender.publish(state)
    sender.close(20.0)
assert sender.num_failed == 1, sender.num_failed
assert "refused" in sender.fault, sender.fault
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_values_that_are_no_numbers_travel(
    collector: Collector, sender: Callable[..., Sender], node: NodeState
) -> None:
    """As in the text format: a gauge may be infinite, and the message is still a message."""
    busy, idle = node.training
    odd = dataclasses.replace(busy, budget_ppm=math.inf)
    sender().publish(dataclasses.replace(node, training=(odd, idle)))
    collector.wait_for(1)

    (point,) = points(collector.came[0][2], "gpulaunch_probe_budget_ratio")
    assert point.as_double == math.inf
