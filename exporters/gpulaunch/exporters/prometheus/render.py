"""A published `NodeState` as a page of metrics, in Prometheus' text format or in OpenMetrics.

`families` is pure: state in, metric families out, every name and label checked against the catalogue. `Board` keeps
the newest state and the pages written from it: a page is written when it is first asked for after a refresh, so an
endpoint that nobody scrapes costs nothing, and one that is hammered costs one page a second.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.exposition import generate_latest as write_text
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.exposition import generate_latest as write_openmetrics

from gpulaunch.exporters.prometheus.catalogue import CATALOGUE, Kind, Metric
from gpulaunch.profiler.record import CheckpointState, NodeState, RankProcesses, TrainingState

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_BY_NAME = {metric.name: metric for metric in CATALOGUE}
_NS_PER_S = 1e9


class CatalogueError(Exception):
    """A value was offered under a name or a label that the catalogue does not have."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the page says about the endpoint itself."""

    version: str
    python: str = platform.python_version()
    scrapes: int = 0
    render_s: float | None = None


class Families:
    """Metric families under construction; they come out in the order of the catalogue, empty ones left out."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def put(self, name: str, value: float | None, /, **labels: str) -> None:
        """Add one value; None is what is not known, and adds nothing."""
        if value is None:
            return
        family = self._family(name, labels)
        family.add_sample(name, labels, value)

    def put_histogram(
        self, name: str, bounds: Sequence[float], counts: Sequence[int], total: float, /, **labels: str
    ) -> None:
        """Add one histogram; `counts` are per bucket and one longer than the bounds."""
        family = self._family(name, labels)
        if not isinstance(family, HistogramMetricFamily) or len(counts) != len(bounds) + 1:
            raise CatalogueError(f"{name} is not a histogram of {len(counts)} buckets")
        seen = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*(repr(float(bound)) for bound in bounds), "+Inf"), counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family.add_metric(list(labels.values()), buckets, total)

    def collect(self) -> Iterable[Family]:
        """Give the families (this makes it a collector of prometheus_client)."""
        return [self._families[metric.name] for metric in CATALOGUE if metric.name in self._families]

    def _family(self, name: str, labels: dict[str, str]) -> Family:
        metric = _BY_NAME.get(name)
        if metric is None:
            raise CatalogueError(f"{name} is not in the catalogue")
        if tuple(labels) != tuple(label.name for label in metric.labels):
            raise CatalogueError(f"{name} has the labels {[label.name for label in metric.labels]}, not {list(labels)}")
        for label in metric.labels:
            if label.values is not None and labels[label.name] not in label.values:
                raise CatalogueError(f"{name}: {label.name}={labels[label.name]!r} is not in the catalogue")
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = _new_family(metric)
        return family


def _new_family(metric: Metric) -> Family:
    # OpenMetrics names a family without the suffix of its samples; the text format puts it back.
    match metric.kind:
        case Kind.COUNTER:
            return Family(metric.name.removesuffix("_total"), metric.help, "counter", metric.unit)
        case Kind.INFO:
            return Family(metric.name.removesuffix("_info"), metric.help, "info")
        case Kind.GAUGE:
            return Family(metric.name, metric.help, "gauge", metric.unit)
        case Kind.HISTOGRAM:
            labels = [label.name for label in metric.labels]
            return HistogramMetricFamily(metric.name, metric.help, labels=labels, unit=metric.unit)


def families(state: NodeState, facts: Facts) -> Families:
    """Give every metric of a state."""
    out = Families()
    out.put("gpulaunch_build_info", 1, version=facts.version, python=facts.python)
    if (group := state.group) is not None:
        out.put(
            "gpulaunch_run_info",
            1,
            run=group.run_id,
            name=group.name,
            world_size=str(group.world_size),
            node_rank=str(group.node_rank),
        )
        out.put("gpulaunch_attempt", group.attempt)
        for place in group.ranks:
            out.put(
                "gpulaunch_rank_info", 1, rank=str(place.rank), local_rank=str(place.local_rank), pid=str(place.pid)
            )
    for training in state.training:
        _put_training(out, training, wall_minus_monotonic_ns=state.taken_wall_ns - state.taken_monotonic_ns)
    for processes in state.processes:
        _put_processes(out, processes)
    _put_run(out, state)
    _put_node(out, state)
    out.put("gpulaunch_sidecar_scrapes_total", facts.scrapes)
    out.put("gpulaunch_sidecar_render_duration_seconds", facts.render_s)
    return out


def _put_training(out: Families, training: TrainingState, *, wall_minus_monotonic_ns: int) -> None:
    rank = str(training.rank)
    out.put("gpulaunch_probe_armed", training.armed, rank=rank)
    out.put("gpulaunch_steps_total", training.steps, rank=rank)
    out.put("gpulaunch_samples_total", training.samples, rank=rank)
    out.put("gpulaunch_microsteps_total", training.microsteps, rank=rank)
    out.put("gpulaunch_skipped_steps_total", training.skipped_steps, rank=rank)
    if training.step_source is not None:
        out.put("gpulaunch_step_source", 1, rank=rank, source=training.step_source)
    out.put_histogram(
        "gpulaunch_step_duration_seconds",
        training.step_bounds_s,
        training.step_counts,
        training.step_ns_total / _NS_PER_S,
        rank=rank,
    )
    for phase, phase_ns in training.phase_ns.items():
        out.put("gpulaunch_phase_seconds_total", phase_ns / _NS_PER_S, rank=rank, phase=phase)
    if training.last_step_monotonic_ns is not None:
        wall_ns = training.last_step_monotonic_ns + wall_minus_monotonic_ns
        # The two clocks are read a moment apart at every refresh: in whole ms a step that stands still stands still
        # here too.
        out.put("gpulaunch_last_step_timestamp_seconds", round(wall_ns / _NS_PER_S, 3), rank=rank)
    if (loader := training.loader) is not None:
        out.put("gpulaunch_dataloader_batches_total", loader.batches, rank=rank)
        out.put("gpulaunch_dataloader_ready_batches", loader.ready, rank=rank)
        out.put("gpulaunch_dataloader_outstanding_batches", loader.outstanding, rank=rank)
        out.put("gpulaunch_dataloader_reorder_blocked_batches", loader.reorder_blocked, rank=rank)
        out.put("gpulaunch_dataloader_workers", loader.workers_configured, rank=rank, state="configured")
    if (gpu := training.gpu) is not None:
        out.put("gpulaunch_gpu_memory_bytes", gpu.allocated_bytes, rank=rank, state="allocated")
        out.put("gpulaunch_gpu_memory_bytes", gpu.reserved_bytes, rank=rank, state="reserved")
        out.put("gpulaunch_gpu_memory_bytes", gpu.peak_allocated_bytes, rank=rank, state="peak_allocated")
    if training.checkpoint is not None:
        _put_checkpoint(out, rank, training.checkpoint)
    out.put(
        "gpulaunch_profiler_overhead_seconds_total", training.probe_ns_total / _NS_PER_S, rank=rank, where="trainer"
    )


def _put_checkpoint(out: Families, rank: str, checkpoint: CheckpointState) -> None:
    out.put("gpulaunch_checkpoint_saves_total", checkpoint.saves, rank=rank)
    out.put("gpulaunch_checkpoint_failures_total", checkpoint.failures, rank=rank)
    out.put("gpulaunch_checkpoint_stall_seconds_total", checkpoint.stall_ns_total / _NS_PER_S, rank=rank)
    out.put("gpulaunch_checkpoint_bytes_total", checkpoint.bytes_total, rank=rank)
    out.put("gpulaunch_checkpoint_step", checkpoint.newest_step, rank=rank)
    out.put("gpulaunch_resumed_step", checkpoint.resumed_step, rank=rank)


def _put_processes(out: Families, processes: RankProcesses) -> None:
    rank = str(processes.rank)
    out.put("gpulaunch_dataloader_workers", processes.workers_alive, rank=rank, state="alive")
    for role, usage in processes.usage.items():
        out.put("gpulaunch_host_memory_bytes", usage.rss_bytes, rank=rank, role=role.value, kind="rss")
        out.put("gpulaunch_host_memory_bytes", usage.pss_bytes, rank=rank, role=role.value, kind="pss")
        out.put("gpulaunch_process_cpu_seconds_total", usage.cpu_user_s, rank=rank, role=role.value, mode="user")
        out.put("gpulaunch_process_cpu_seconds_total", usage.cpu_system_s, rank=rank, role=role.value, mode="system")


def _put_run(out: Families, state: NodeState) -> None:
    captured_ns = [
        training.checkpoint.captured_monotonic_ns
        for training in state.training
        if training.checkpoint is not None and training.checkpoint.captured_monotonic_ns is not None
    ]
    if captured_ns:
        age_ns = max(0, state.taken_monotonic_ns - max(captured_ns))  # it may have been taken since the refresh began
        out.put("gpulaunch_checkpoint_age_seconds", age_ns / _NS_PER_S)
    if (run := state.run) is None:
        return
    for bucket, goodput_ns in run.goodput_ns.items():
        out.put("gpulaunch_goodput_seconds_total", goodput_ns / _NS_PER_S, bucket=bucket)
    for kind, count in run.restarts.items():
        out.put("gpulaunch_restarts_total", count, kind=kind)
    out.put("gpulaunch_hang_suspicions_total", run.hang_suspicions)
    out.put("gpulaunch_hangs_total", run.hangs)
    out.put("gpulaunch_preempted", run.preempted)


def _put_node(out: Families, state: NodeState) -> None:
    for gpu in state.gpus:
        for xid, count in gpu.xids.items():
            out.put("gpulaunch_gpu_xid_errors_total", count, gpu=str(gpu.index), xid=str(xid))
        out.put("gpulaunch_gpu_ecc_errors_total", gpu.ecc_uncorrected, gpu=str(gpu.index), severity="uncorrected")
    if (host := state.host) is not None:
        out.put("gpulaunch_shm_bytes", host.shm_used_bytes, state="used")
        out.put("gpulaunch_shm_bytes", host.shm_size_bytes, state="size")
        out.put("gpulaunch_node_memory_bytes", host.memory_total_bytes, state="total")
        out.put("gpulaunch_node_memory_bytes", host.memory_available_bytes, state="available")
    for collector, condition in state.collectors.items():
        out.put("gpulaunch_collector_available", condition.available, collector=collector.value)
        out.put("gpulaunch_collector_errors_total", condition.errors, collector=collector.value)
        out.put("gpulaunch_collector_seconds_total", condition.spent_s, collector=collector.value)
    sidecar = state.sidecar
    out.put("gpulaunch_profiler_overhead_seconds_total", sidecar.cpu_s, rank="", where="sidecar")
    out.put("gpulaunch_sidecar_memory_bytes", sidecar.rss_bytes)
    out.put("gpulaunch_sidecar_refreshes_total", sidecar.refreshes)
    out.put("gpulaunch_sidecar_late_refreshes_total", sidecar.late_refreshes)
    out.put("gpulaunch_sidecar_refresh_duration_seconds", sidecar.refresh_s)


def negotiate(accept: str) -> str:
    """Give the content type for an Accept header: OpenMetrics if it is liked at least as much as plain text."""
    weight = {"application/openmetrics-text": 0.0, "text/plain": 0.0, "text/*": 0.0, "*/*": 0.0}
    for clause in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in clause.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        if kind in weight and quality.replace(".", "", 1).isdecimal() and quality.isascii():
            weight[kind] = max(weight[kind], float(quality))
    openmetrics = weight.pop("application/openmetrics-text")
    return OPENMETRICS if openmetrics and openmetrics >= max(weight.values()) else TEXT


class Board:
    """The newest state, and the pages written from it. `publish` may be called from another thread than the rest."""

    def __init__(self, *, version: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._facts = Facts(version=version)
        self._clock = clock
        self._state: NodeState | None = None
        self._pages: dict[str, tuple[NodeState, bytes]] = {}

    @property
    def state(self) -> NodeState | None:
        """The newest state; None before the first refresh."""
        return self._state

    def publish(self, state: NodeState) -> None:
        """Show this state from now on."""
        self._state = state  # one reference, replaced whole: a reader has the old state or the new one

    def metrics(self, accept: str) -> tuple[str, bytes]:
        """Give the content type and the page of metrics, as an Accept header asks for it."""
        state = self._state
        kind = negotiate(accept)
        facts = self._facts = _asked_again(self._facts)
        if state is None:
            return kind, b"# EOF\n" if kind == OPENMETRICS else b""
        cached = self._pages.get(kind)
        if cached is not None and cached[0] is state:
            return kind, cached[1]
        started = self._clock()
        page = (write_openmetrics if kind == OPENMETRICS else write_text)(families(state, facts))
        self._pages[kind] = (state, page)
        self._facts = Facts(version=facts.version, scrapes=facts.scrapes, render_s=self._clock() - started)
        return kind, page


def _asked_again(facts: Facts) -> Facts:
    return Facts(version=facts.version, scrapes=facts.scrapes + 1, render_s=facts.render_s)
