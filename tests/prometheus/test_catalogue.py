"""The list of metrics is frozen: a new name or label is an argument to be made, not a side effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpulaunch.exporters.prometheus import catalogue
from gpulaunch.exporters.prometheus.catalogue import CATALOGUE, Metric
from gpulaunch.exporters.prometheus.metrics.metric import Kind
from gpulaunch.launcher.failure.classify import Kind as EndKind
from gpulaunch.profiler.analysis.rules import RULES
from gpulaunch.profiler.channel import layout
from gpulaunch.profiler.channel.collectives import KINDS
from gpulaunch.profiler.record import RESTART_KINDS, THROTTLE_REASONS, Collector, Role
from gpulaunch.profiler.xid import PROGRAM_XIDS, XID_TEXTS, XIDS

FROZEN = """
gpulaunch_attempt
gpulaunch_build_info python version
gpulaunch_cgroup_memory_bytes state=limit|used
gpulaunch_checkpoint_age_seconds
gpulaunch_checkpoint_bytes_total rank
gpulaunch_checkpoint_failures_total rank
gpulaunch_checkpoint_saves_total rank
gpulaunch_checkpoint_stall_seconds_total rank
gpulaunch_checkpoint_step rank
gpulaunch_collective_calls_total kind=COLLECTIVES rank
gpulaunch_collective_sequence rank
gpulaunch_collectives_completed_total rank
gpulaunch_collectives_enqueued_total rank
gpulaunch_collector_available collector=COLLECTORS
gpulaunch_collector_errors_total collector=COLLECTORS
gpulaunch_collector_seconds_total collector=COLLECTORS
gpulaunch_comm_blocked_seconds_total rank
gpulaunch_comm_calls_total rank
gpulaunch_compile_seconds_total rank
gpulaunch_compiles_total rank
gpulaunch_copies_total direction=d2d|d2h|h2d host_memory=|pageable|pinned rank
gpulaunch_copy_blocked_seconds_total direction=d2d|d2h|h2d host_memory=|pageable|pinned rank
gpulaunch_copy_bytes_total direction=d2d|d2h|h2d host_memory=|pageable|pinned rank
gpulaunch_copy_coverage_ratio direction=d2h|h2d gpu
gpulaunch_copy_gpu_seconds_total direction=d2d|d2h|h2d host_memory=|pageable|pinned rank
gpulaunch_cpu_cores state=allowed|quota
gpulaunch_dataloader_batch_bytes_total rank
gpulaunch_dataloader_batches_total rank
gpulaunch_dataloader_eval_batches_total rank
gpulaunch_dataloader_outstanding_batches rank
gpulaunch_dataloader_pin_backlog_batches rank
gpulaunch_dataloader_ready_batches rank
gpulaunch_dataloader_reorder_blocked_batches rank
gpulaunch_dataloader_reorder_blocked_seconds_total rank
gpulaunch_dataloader_transfer_seconds_total rank
gpulaunch_dataloader_wait_seconds rank
gpulaunch_dataloader_worker_collate_seconds_total rank
gpulaunch_dataloader_worker_read_bytes_total rank source=cache|storage
gpulaunch_dataloader_worker_seconds_total rank state=blocked|contention|prep
gpulaunch_dataloader_workers rank state=alive|configured
gpulaunch_ddp_comm_seconds rank
gpulaunch_ddp_overlap_seconds rank
gpulaunch_finding_active rule=RULES
gpulaunch_finding_lost_ratio rule=RULES
gpulaunch_gc_collections_total rank
gpulaunch_gc_seconds_total rank
gpulaunch_goodput_seconds_total bucket=checkpoint_stall|detection|lost_work|productive|restart|startup|teardown
gpulaunch_gpu_alloc_retries_total rank
gpulaunch_gpu_clock_hertz domain=sm gpu
gpulaunch_gpu_device_memory_bytes gpu state=total|used
gpulaunch_gpu_dram_active_ratio gpu
gpulaunch_gpu_ecc_errors_total gpu severity=corrected|uncorrected
gpulaunch_gpu_energy_joules_total gpu
gpulaunch_gpu_info gpu model parent uuid
gpulaunch_gpu_memory_bytes rank state=active|allocated|inactive_split|peak_allocated|peak_reserved|reserved
gpulaunch_gpu_nvlink_bytes_total direction=receive|transmit gpu
gpulaunch_gpu_ooms_total rank
gpulaunch_gpu_pcie_bytes_total direction=receive|transmit gpu
gpulaunch_gpu_pcie_link_generation gpu state=max|now
gpulaunch_gpu_pcie_link_width gpu state=max|now
gpulaunch_gpu_pcie_replays_total gpu
gpulaunch_gpu_pipe_active_ratio gpu pipe=fp16|fp32|fp64|tensor
gpulaunch_gpu_power_watts gpu
gpulaunch_gpu_row_remap_failed gpu
gpulaunch_gpu_row_remap_pending gpu
gpulaunch_gpu_row_remaps_total gpu kind=correctable|uncorrectable
gpulaunch_gpu_sm_active_ratio gpu
gpulaunch_gpu_sm_occupancy_ratio gpu
gpulaunch_gpu_temperature_celsius gpu sensor=core
gpulaunch_gpu_throttle_seconds_total gpu reason=THROTTLE_REASONS
gpulaunch_gpu_timed_steps_total rank
gpulaunch_gpu_utilization_ratio gpu
gpulaunch_gpu_xid_errors_total gpu xid=XIDS
gpulaunch_hang_suspicions_total
gpulaunch_hangs_total
gpulaunch_host_memory_bytes kind=pss|rss rank role=trainer|workers
gpulaunch_last_collective kind=COLLECTIVES rank state=returned|running
gpulaunch_last_step_timestamp_seconds rank
gpulaunch_microsteps_total rank
gpulaunch_node_memory_bytes state=available|page_cache|swap_used|total
gpulaunch_node_pressure_seconds_total resource=cpu|io|memory severity=full|some
gpulaunch_phase_gpu_seconds_total phase=backward|forward|optimizer rank
gpulaunch_phase_seconds_total phase=PHASES rank
gpulaunch_pinned_memory_bytes rank
gpulaunch_preempted
gpulaunch_probe_armed rank
gpulaunch_probe_budget_ratio rank
gpulaunch_probe_part_unavailable part=HOOKS rank
gpulaunch_process_busy_threads rank
gpulaunch_process_cpu_seconds_total mode=system|user rank role=trainer|workers
gpulaunch_process_runqueue_seconds_total rank role=trainer|workers
gpulaunch_profiler_overhead_seconds_total rank where=sidecar|trainer
gpulaunch_rank_info local_rank pid rank
gpulaunch_rank_stalled_seconds rank
gpulaunch_restarts_total kind=KINDS
gpulaunch_resumed_step rank
gpulaunch_run_info name node_rank run world_size
gpulaunch_samples_total rank
gpulaunch_shm_bytes state=size|used
gpulaunch_shm_inflight_bytes rank
gpulaunch_sidecar_late_refreshes_total
gpulaunch_sidecar_memory_bytes
gpulaunch_sidecar_refresh_duration_seconds
gpulaunch_sidecar_refreshes_total
gpulaunch_sidecar_render_duration_seconds
gpulaunch_sidecar_scrapes_total
gpulaunch_skipped_steps_total rank
gpulaunch_stack_samples_total phase=STACK_PHASES
gpulaunch_step_duration_seconds rank
gpulaunch_step_source rank source=backward|dataloader|mark|optimizer
gpulaunch_steps_total rank
gpulaunch_sync_blocked_seconds_total kind=bool|cpu|item|nonzero|numpy|other|synchronize|tolist rank
gpulaunch_sync_calls_total kind=bool|cpu|item|nonzero|numpy|other|synchronize|tolist rank
gpulaunch_unobserved_steps_total rank
"""
FROZEN_VALUES = {
    "=COLLECTIVES": KINDS,
    "=COLLECTORS": "collectives device findings gpu host ledger process ranks run stacks store workers".split(),
    "=HOOKS": [(hook.name or "").lower() for hook in layout.Hook],
    "=KINDS": RESTART_KINDS,
    "=RULES": [rule.id for rule in RULES],
    "=STACK_PHASES": ("startup", *layout.PHASES, "unsettled"),
    "=PHASES": layout.PHASES,
    "=THROTTLE_REASONS": THROTTLE_REASONS,
    "=XIDS": (
        "13 31 32 43 45 46 48 61 62 63 64 68 69 74 79 92 94 95 109 119 120 121 137 140 143 "
        "144 145 146 147 148 149 150 154 other"
    ).split(),
}
"""Closed sets that have a frozen list, or a reason to grow, of their own."""
for word, values in FROZEN_VALUES.items():
    FROZEN = FROZEN.replace(word, "=" + "|".join(sorted(values)))


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
    assert metric.unit in ("", "seconds", "bytes", "ratio", "hertz", "watts", "joules", "celsius")
    for unit in ("seconds", "bytes", "ratio", "hertz", "watts", "joules", "celsius"):
        assert metric.name.removesuffix("_total").endswith(f"_{unit}") == (metric.unit == unit)
    assert not re.search(r"milli|micro_|nano|kilo|_ms|_ns|percent|_per_", metric.name)
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
    """Another kind would still be counted, as "other"."""
    assert set(RESTART_KINDS) == {kind.value for kind in EndKind} | {"other"}


def test_an_xid_that_means_something_to_the_agent_has_a_series_of_its_own() -> None:
    """Alerts leave out the ones that programs cause; they could not if those were under "other"."""
    known = values_of("gpulaunch_gpu_xid_errors_total", "xid")

    assert known == {*map(str, XIDS), "other"}
    assert {*map(str, PROGRAM_XIDS | XID_TEXTS.keys())} <= known


def test_only_ranks_and_gpus_are_numbered_and_only_what_is_joined_is_described() -> None:
    """A label whose values are not listed may have any number of them: a rank and a GPU have their number, a run and
    what it runs on a description. A description on any other metric would begin a new series whenever it changes."""
    of_infos: set[str] = set()
    of_others: set[str] = set()
    for metric in CATALOGUE:
        (of_infos if metric.kind is Kind.INFO else of_others).update(
            label.name for label in metric.labels if label.values is None
        )
    assert of_others == {"rank", "gpu"}
    described = {"run", "name", "world_size", "node_rank", "local_rank", "pid", "uuid", "parent", "model"}
    assert of_infos == {"rank", "gpu", "version", "python", *described}


def test_a_pid_is_a_label_of_rank_info_only() -> None:
    """Anything else would begin a new series with every restart."""
    assert [m.name for m in CATALOGUE if any(label.name == "pid" for label in m.labels)] == ["gpulaunch_rank_info"]


def test_a_uuid_is_a_label_of_gpu_info_only() -> None:
    """Anything else would begin a new series with every MIG instance that is made anew. That no other label has one for
    its value is in device/test_mig.py."""
    holds_one = [m.name for m in CATALOGUE if any(label.name in ("uuid", "parent") for label in m.labels)]
    assert holds_one == ["gpulaunch_gpu_info"]
