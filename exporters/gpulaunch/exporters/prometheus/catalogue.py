"""Every metric once: name, type, unit, help and labels. The renderer refuses anything that is not written here.

Rules (https://prometheus.io/docs/practices/naming/): base units, `_total` on counters, `_info` for facts that are
joined, one quantity and one unit per metric, sums over labels make sense, and every label other than a number (of a
rank, a GPU, an Xid) or the description of the run has a closed set of values. What is not known is absent, never zero.
No argument, environment value or path is a label.

`docs/metrics.md` is written from this table: python -m gpulaunch.exporters.prometheus.catalogue > docs/metrics.md
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum

from gpulaunch.profiler.record import GOODPUT_BUCKETS, RESTART_KINDS


class Kind(Enum):
    """How the values of a metric behave."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, kw_only=True)
class Label:
    """A label and the values it may have; no values: any, for an index or a description."""

    name: str
    values: frozenset[str] | None = None


def _one_of(name: str, *values: str) -> Label:
    return Label(name=name, values=frozenset(values))


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One row of the catalogue."""

    name: str
    """As Prometheus stores it, without the `_bucket`, `_sum` and `_count` of a histogram."""
    kind: Kind
    help: str
    unit: str = ""
    labels: tuple[Label, ...] = ()


RANK = Label(name="rank")
GPU = Label(name="gpu")
COLLECTOR = _one_of("collector", "ranks", "process", "host", "run", "gpu", "ledger")

CATALOGUE: tuple[Metric, ...] = (
    Metric(
        name="gpulaunch_build_info",
        kind=Kind.INFO,
        labels=(Label(name="version"), Label(name="python")),
        help="The version of gpulaunch and of the Python that its sidecar runs on.",
    ),
    Metric(
        name="gpulaunch_run_info",
        kind=Kind.INFO,
        labels=(Label(name="run"), Label(name="name"), Label(name="world_size"), Label(name="node_rank")),
        help="The run: its unique token, its name, how many ranks it has in all, and which of its nodes this is.",
    ),
    Metric(
        name="gpulaunch_attempt",
        kind=Kind.GAUGE,
        help="The running attempt, counted from 0; it grows with every restart of the ranks.",
    ),
    Metric(
        name="gpulaunch_rank_info",
        kind=Kind.INFO,
        labels=(RANK, Label(name="local_rank"), Label(name="pid")),
        help="A rank of this node and its process: join on rank to learn the pid.",
    ),
    Metric(
        name="gpulaunch_probe_armed",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="1 once the probe measures in this rank; it stays 0 in a program that never imports torch.",
    ),
    Metric(
        name="gpulaunch_steps_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Optimizer steps made, all attempts together.",
    ),
    Metric(
        name="gpulaunch_samples_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Samples taken from the dataloader, where the batch size is known.",
    ),
    Metric(
        name="gpulaunch_microsteps_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Backward passes; more than the steps where gradients are accumulated.",
    ),
    Metric(
        name="gpulaunch_skipped_steps_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Steps whose optimizer was not called, as a gradient scaler does after an overflow.",
    ),
    Metric(
        name="gpulaunch_step_source",
        kind=Kind.GAUGE,
        labels=(RANK, _one_of("source", "optimizer", "backward", "dataloader", "mark")),
        help="1 for the signal that a step is counted by in this rank.",
    ),
    Metric(
        name="gpulaunch_step_duration_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        labels=(RANK,),
        help="Time from the end of one step to the end of the next.",
    ),
    Metric(
        name="gpulaunch_phase_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(RANK, _one_of("phase", "data_wait", "forward", "backward", "optimizer", "other")),
        help="Time the training loop spent in each phase, by the host's clock; phases add up to the steps.",
    ),
    Metric(
        name="gpulaunch_last_step_timestamp_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        labels=(RANK,),
        help="When the last step ended (Unix time).",
    ),
    Metric(
        name="gpulaunch_dataloader_batches_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Batches handed to the training loop.",
    ),
    Metric(
        name="gpulaunch_dataloader_ready_batches",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="Batches ready when the training loop last asked for one; mostly 0: the loader is too slow.",
    ),
    Metric(
        name="gpulaunch_dataloader_outstanding_batches",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="Batches asked of the workers and not yet handed out.",
    ),
    Metric(
        name="gpulaunch_dataloader_reorder_blocked_batches",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="Finished batches that had to wait for an earlier one (see in_order of torch's DataLoader).",
    ),
    Metric(
        name="gpulaunch_dataloader_workers",
        kind=Kind.GAUGE,
        labels=(RANK, _one_of("state", "configured", "alive")),
        help="Dataloader workers: as the loader was told, and processes that live now.",
    ),
    Metric(
        name="gpulaunch_host_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(RANK, _one_of("role", "trainer", "workers"), _one_of("kind", "rss", "pss")),
        help="Host memory of a rank's process and of all processes below it: resident (shared pages counted in each)"
        " and proportional (shared pages divided, so that it may be added up).",
    ),
    Metric(
        name="gpulaunch_process_cpu_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(RANK, _one_of("role", "trainer", "workers"), _one_of("mode", "user", "system")),
        help="CPU time of a rank's process and of all processes below it, those that have ended included.",
    ),
    Metric(
        name="gpulaunch_gpu_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(RANK, _one_of("state", "allocated", "reserved", "peak_allocated")),
        help="torch's caching allocator on the rank's GPU; absent where the rank uses none.",
    ),
    Metric(
        name="gpulaunch_checkpoint_saves_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Checkpoints committed; these and the next ones are from gpulaunch.checkpoint.",
    ),
    Metric(
        name="gpulaunch_checkpoint_failures_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Saves that came to nothing; training went on.",
    ),
    Metric(
        name="gpulaunch_checkpoint_stall_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(RANK,),
        help="Time that the training loop stood still for saves.",
    ),
    Metric(
        name="gpulaunch_checkpoint_bytes_total",
        kind=Kind.COUNTER,
        unit="bytes",
        labels=(RANK,),
        help="Written by this rank into checkpoints that were committed.",
    ),
    Metric(
        name="gpulaunch_checkpoint_step",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="The step of the newest checkpoint committed, in this attempt or an earlier one.",
    ),
    Metric(
        name="gpulaunch_checkpoint_age_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="Since the state in the newest checkpoint of this node's ranks was taken: what a failure now would cost.",
    ),
    Metric(
        name="gpulaunch_resumed_step",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="The step that this rank went on from in the running attempt.",
    ),
    Metric(
        name="gpulaunch_goodput_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(_one_of("bucket", *GOODPUT_BUCKETS),),
        help="Where the time of the run went, as its agent on this node sees it; every second is in one bucket. Steps"
        " that must be done again are lost work, and productive stands still until they are made up for.",
    ),
    Metric(
        name="gpulaunch_restarts_total",
        kind=Kind.COUNTER,
        labels=(_one_of("kind", *RESTART_KINDS),),
        help="Times that the ranks were started again, by what ended the attempt before.",
    ),
    Metric(
        name="gpulaunch_hang_suspicions_total",
        kind=Kind.COUNTER,
        help="Times that the ranks made no progress for so long that their stacks were taken.",
    ),
    Metric(
        name="gpulaunch_hangs_total",
        kind=Kind.COUNTER,
        help="Suspicions that were found to be hangs.",
    ),
    Metric(
        name="gpulaunch_preempted",
        kind=Kind.GAUGE,
        help="1 from the moment that the run was asked to save and to end.",
    ),
    Metric(
        name="gpulaunch_gpu_xid_errors_total",
        kind=Kind.COUNTER,
        labels=(GPU, Label(name="xid")),
        help="Critical errors that the driver reported for this GPU since the run began, by number in NVIDIA's"
        " Xid catalogue; absent while there is none.",
    ),
    Metric(
        name="gpulaunch_gpu_ecc_errors_total",
        kind=Kind.COUNTER,
        labels=(GPU, _one_of("severity", "uncorrected")),
        help="Memory errors since the driver was loaded; absent where ECC is off or not there.",
    ),
    Metric(
        name="gpulaunch_shm_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(_one_of("state", "used", "size"),),
        help="Shared memory of the node (/dev/shm), which carries batches from workers to ranks; full: a bus error.",
    ),
    Metric(
        name="gpulaunch_node_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(_one_of("state", "total", "available"),),
        help="Memory of the node, and how much of it programs could still get.",
    ),
    Metric(
        name="gpulaunch_profiler_overhead_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(RANK, _one_of("where", "trainer", "sidecar")),
        help="What measuring costs: time inside the probe of each rank, CPU time of the sidecar (its rank is empty).",
    ),
    Metric(
        name="gpulaunch_collector_available",
        kind=Kind.GAUGE,
        labels=(COLLECTOR,),
        help="1 if this part of the sidecar delivers, 0 if it cannot; the sidecar's page says why.",
    ),
    Metric(
        name="gpulaunch_collector_errors_total",
        kind=Kind.COUNTER,
        labels=(COLLECTOR,),
        help="Readings, or parts of readings, that failed.",
    ),
    Metric(
        name="gpulaunch_collector_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(COLLECTOR,),
        help="Time spent collecting.",
    ),
    Metric(
        name="gpulaunch_sidecar_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        help="Resident memory of the sidecar.",
    ),
    Metric(
        name="gpulaunch_sidecar_refreshes_total",
        kind=Kind.COUNTER,
        help="Times that all collectors were read.",
    ),
    Metric(
        name="gpulaunch_sidecar_late_refreshes_total",
        kind=Kind.COUNTER,
        help="Refreshes that came a whole interval too late or more.",
    ),
    Metric(
        name="gpulaunch_sidecar_refresh_duration_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="How long the last complete refresh took.",
    ),
    Metric(
        name="gpulaunch_sidecar_scrapes_total",
        kind=Kind.COUNTER,
        help="Times that this page was asked for.",
    ),
    Metric(
        name="gpulaunch_sidecar_render_duration_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="How long this page took to write the last time it was written; it is written at most once a refresh.",
    ),
)


def markdown() -> str:
    """Give the catalogue as the page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Written from `exporters/gpulaunch/exporters/prometheus/catalogue.py`; a test keeps the two the same.",
        "What is not known is absent, never zero. Counters go on over restarts of the ranks and of the sidecar.",
        "",
        "| name | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in CATALOGUE:
        labels = ", ".join(
            f"`{label.name}`" + (f" = {' / '.join(sorted(label.values))}" if label.values else "")
            for label in metric.labels
        )
        lines.append(f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
