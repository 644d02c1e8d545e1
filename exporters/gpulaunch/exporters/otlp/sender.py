"""Sends the newest state to an OTLP collector at a fixed interval, from a separate thread.

The library's exporter does the sending; its OTEL_EXPORTER_OTLP_ variables set retries, compression, certificates and
headers. It reports errors by `logging` only; they are captured here, kept as one line, and not logged elsewhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.resources import Resource

from gpulaunch.exporters.otlp.extra import CLOSE_S, endpoint
from gpulaunch.exporters.otlp.points import data_of, resource_of
from gpulaunch.exporters.prometheus.values import Facts, families
from gpulaunch.profiler.record import NodeState

INTERVAL_S: Final = 15.0
"""How often a state is sent: a typical scrape interval."""
TIMEOUT_S: Final = 10.0
"""How long one message may take, its retries included; the library's own default."""
_LIBRARY: Final = "opentelemetry"


class Sender:
    """Owns the thread. `publish` may be called from any other thread, and only stores the state."""

    def __init__(
        self,
        url: str,
        *,
        node: str,
        version: str,
        run: str = "",
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
        on_fault: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare it.

        Args:
            url: of the collector, valid by `extra.complaint_about`.
            node: the host's name.
            version: of gpulaunch.
            run: id shared by all nodes of the run; "" for the run's own token.
            interval_s: between messages.
            timeout_s: for one message.
            on_fault: called with the first line of each series of errors.
        """
        self._url = url
        self._node = node
        self._version = version
        self._run = run
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._on_fault = on_fault
        self._state: NodeState | None = None
        self._sent: NodeState | None = None
        self._resource: Resource | None = None
        self._resource_is_of = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="otlp", daemon=True)
        self._exporter: OTLPMetricExporter | None = None
        self._troubles = _Troubles()
        self.fault = ""
        """Why the last message did not arrive, as one line; "" if it did."""
        self.num_sent = 0
        self.num_failed = 0

    def start(self) -> None:
        """Start. Raises ValueError if the library rejects its OTEL_EXPORTER_OTLP_ variables."""
        logger = logging.getLogger(_LIBRARY)
        logger.handlers[:] = [self._troubles]
        logger.propagate = False
        self._exporter = OTLPMetricExporter(endpoint=endpoint(self._url), timeout=self._timeout_s)
        self._thread.start()

    def publish(self, state: NodeState) -> None:
        """Send this state at the next interval, unless a newer one comes first."""
        self._state = state

    def close(self, longest_s: float = CLOSE_S) -> None:
        """Send the newest state and stop; block for `longest_s` at most."""
        self._stop.set()
        if self._thread.ident is None:
            return
        self._thread.join(longest_s)
        if self._thread.is_alive() and self._exporter is not None:
            self._exporter.shutdown()  # it may wait for its next retry; the thread is abandoned

    def _run_thread(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(self._interval_s)
            state = self._state
            if state is not None and state.group is not None and state is not self._sent:
                self._send(state)
        if self._exporter is not None:
            self._exporter.shutdown()

    def _send(self, state: NodeState) -> None:
        assert self._exporter is not None, "start() makes it"
        self._troubles.last = ""
        try:
            found = families(state, Facts(version=self._version)).collect()
            data = data_of(found, self._sender_of(state), taken_wall_ns=state.taken_wall_ns, version=self._version)
            result = self._exporter.export(data)
            fault = "" if result is MetricExportResult.SUCCESS else self._troubles.last or "no reason given"
        except Exception as error:  # a failed message must not end the thread or the job
            fault = f"{type(error).__name__}: {error}".splitlines()[0]
        if not fault:
            self._sent = state
            self.num_sent += 1
        else:
            self.num_failed += 1
            if not self.fault and self._on_fault is not None:
                self._on_fault(f"cannot send metrics to {endpoint(self._url)}: {fault}")
        self.fault = fault

    def _sender_of(self, state: NodeState) -> Resource:
        group = state.group
        assert group is not None, "checked by the caller"
        if self._resource is None or self._resource_is_of != group.run_id:
            self._resource_is_of = group.run_id
            self._resource = resource_of(
                run=self._run or group.run_id,
                token=group.run_id,
                name=group.name,
                node=self._node,
                version=self._version,
            )
        return self._resource


class _Troubles(logging.Handler):
    """Keeps the last error that the library logged, as one line."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record; the final message on giving up says less than the error it retried for."""
        said = record.getMessage().splitlines()
        gave_up = bool(said) and ("due to timeout" in said[0] or "Shutdown in progress" in said[0])
        if said and not (gave_up and self.last):
            self.last = said[0].partition(", retrying")[0][:300]
