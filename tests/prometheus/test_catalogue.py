"""The list of metrics is frozen: a new name or label is an argument to be made, not a side effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpulaunch.exporters.prometheus import catalogue
from gpulaunch.exporters.prometheus.catalogue import CATALOGUE, Kind, Metric
from gpulaunch.launcher.failure.classify import Kind as EndKind
from gpulaunch.launcher.policy import goodput
from gpulaunch.profiler.channel import layout
from gpulaunch.profiler.record import GOODPUT_BUCKETS, RESTART_KINDS, Collector, Role

FROZEN = """
gpulaunch_attempt
gpulaunch_build_info python version
gpulaunch_checkpoint_age_seconds
gpulaunch_checkpoint_bytes_total rank
gpulaunch_checkpoint_failures_total rank
gpulaunch_checkpoint_saves_total rank
gpulaunch_checkpoint_stall_seconds_total rank
gpulaunch_checkpoint_step rank
gpulaunch_collector_available collector=gpu|host|ledger|process|ranks|run
gpulaunch_collector_errors_total collector=gpu|host|ledger|process|ranks|run
gpulaunch_collector_seconds_total collector=gpu|host|ledger|process|ranks|run
gpulaunch_dataloader_batches_total rank
gpulaunch_dataloader_outstanding_batches rank
gpulaunch_dataloader_ready_batches rank
gpulaunch_dataloader_reorder_blocked_batches rank
gpulaunch_dataloader_workers rank state=alive|configured
gpulaunch_goodput_seconds_total bucket=checkpoint_stall|detection|lost_work|productive|restart|startup|teardown
gpulaunch_gpu_ecc_errors_total gpu severity=uncorrected
gpulaunch_gpu_memory_bytes rank state=allocated|peak_allocated|reserved
gpulaunch_gpu_xid_errors_total gpu xid
gpulaunch_hang_suspicions_total
gpulaunch_hangs_total
gpulaunch_host_memory_bytes kind=pss|rss rank role=trainer|workers
gpulaunch_last_step_timestamp_seconds rank
gpulaunch_microsteps_total rank
gpulaunch_node_memory_bytes state=available|total
gpulaunch_phase_seconds_total phase=backward|data_wait|forward|optimizer|other rank
gpulaunch_preempted
gpulaunch_probe_armed rank
gpulaunch_process_cpu_seconds_total mode=system|user rank role=trainer|workers
gpulaunch_profiler_overhead_seconds_total rank where=sidecar|trainer
gpulaunch_rank_info local_rank pid rank
gpulaunch_restarts_total kind=KINDS
gpulaunch_resumed_step rank
gpulaunch_run_info name node_rank run world_size
gpulaunch_samples_total rank
gpulaunch_shm_bytes state=size|used
gpulaunch_sidecar_late_refreshes_total
gpulaunch_sidecar_memory_bytes
gpulaunch_sidecar_refresh_duration_seconds
gpulaunch_sidecar_refreshes_total
gpulaunch_sidecar_render_duration_seconds
gpulaunch_sidecar_scrapes_total
gpulaunch_skipped_steps_total rank
gpulaunch_step_duration_seconds rank
gpulaunch_step_source rank source=backward|dataloader|mark|optimizer
gpulaunch_steps_total rank
""".replace("KINDS", "|".join(sorted(RESTART_KINDS)))


def line(metric: Metric) -> str:
    labels = sorted(
        label.name + ("=" + "|".join(sorted(label.values)) if label.values else "") for label in metric.labels
    )
    return " ".join([metric.name, *labels])


def test_the_catalogue_is_what_it_was() -> None:
    assert sorted(map(line, CATALOGUE)) == FROZEN.split("\n")[1:-1]


def test_the_documentation_is_the_catalogue() -> None:
    """To renew it: python -m gpulaunch.exporters.prometheus.catalogue > docs/metrics.md"""
    page = Path(__file__).parents[2] / "docs/metrics.md"
    assert page.read_text() == catalogue.markdown()


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_names_follow_the_rules(metric: Metric) -> None:
    """https://prometheus.io/docs/practices/naming/"""
    assert re.fullmatch(r"gpulaunch(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert metric.name.endswith("_info") == (metric.kind is Kind.INFO)
    assert metric.unit in ("", "seconds", "bytes")
    for unit in ("seconds", "bytes"):
        assert metric.name.removesuffix("_total").endswith(f"_{unit}") == (metric.unit == unit)
    assert not re.search(r"milli|micro_|nano|kilo|_ms|_ns|percent", metric.name)
    assert metric.help.endswith(".")


def test_every_name_is_there_once() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names))


def values_of(name: str, label_name: str) -> frozenset[str] | None:
    metric = next(metric for metric in CATALOGUE if metric.name == name)
    return next(label.values for label in metric.labels if label.name == label_name)


def test_closed_labels_are_those_of_the_rooms_they_come_from() -> None:
    sources = {source.name.lower() for source in layout.StepSource if source}
    assert values_of("gpulaunch_phase_seconds_total", "phase") == set(layout.PHASES)
    assert values_of("gpulaunch_step_source", "source") == sources
    assert values_of("gpulaunch_collector_available", "collector") == {collector.value for collector in Collector}
    assert values_of("gpulaunch_host_memory_bytes", "role") == {role.value for role in Role}


def test_what_the_agent_names_is_known_by_its_name() -> None:
    """Another kind would still be counted, as "other"; another bucket would be missed."""
    assert set(RESTART_KINDS) == {kind.value for kind in EndKind} | {"other"}
    assert GOODPUT_BUCKETS == goodput.BUCKETS


def test_a_pid_is_a_label_of_rank_info_only() -> None:
    """Anything else would begin a new series with every restart."""
    assert [m.name for m in CATALOGUE if any(label.name == "pid" for label in m.labels)] == ["gpulaunch_rank_info"]
