"""Metrics of the node's GPUs, as reported by the driver."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.metric import GPU, Kind, Label, Metric, one_of
from gpulaunch.profiler.record import DIRECTIONS, THROTTLE_REASONS
from gpulaunch.profiler.xid import XIDS

GPUS: tuple[Metric, ...] = (
    Metric(
        name="gpulaunch_gpu_xid_errors_total",
        kind=Kind.COUNTER,
        labels=(GPU, one_of("xid", *map(str, XIDS), "other")),
        help="Critical errors that the driver reported for this GPU since the run began, by number in NVIDIA's"
        " Xid catalogue, or other, which the kernel's log has the number of; absent while there is none.",
    ),
    Metric(
        name="gpulaunch_gpu_ecc_errors_total",
        kind=Kind.COUNTER,
        labels=(GPU, one_of("severity", "corrected", "uncorrected")),
        help="Memory errors since the driver was loaded; absent where ECC is off or not there.",
    ),
    Metric(
        name="gpulaunch_gpu_info",
        kind=Kind.INFO,
        labels=(
            GPU,
            Label(name="uuid"),
            Label(name="parent"),
            Label(name="model"),
        ),
        help="A GPU of the node, or a MIG instance: then `gpu` is 0.7 for GPU instance 7 of card 0, and parent the"
        " card's UUID.",
    ),
    Metric(
        name="gpulaunch_gpu_utilization_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(GPU,),
        help="Share of the last second at most in which at least one kernel ran, however small.",
    ),
    Metric(
        name="gpulaunch_gpu_device_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(
            GPU,
            one_of("state", "used", "total"),
        ),
        help="Memory of the GPU, used by whomever; see gpulaunch_gpu_memory_bytes for the ranks.",
    ),
    Metric(
        name="gpulaunch_gpu_clock_hertz",
        kind=Kind.GAUGE,
        unit="hertz",
        labels=(
            GPU,
            one_of("domain", "sm"),
        ),
        help="Clock of the streaming multiprocessors.",
    ),
    Metric(
        name="gpulaunch_gpu_power_watts",
        kind=Kind.GAUGE,
        unit="watts",
        labels=(GPU,),
        help="What the GPU draws now.",
    ),
    Metric(
        name="gpulaunch_gpu_energy_joules_total",
        kind=Kind.COUNTER,
        unit="joules",
        labels=(GPU,),
        help="What it has used since the run began.",
    ),
    Metric(
        name="gpulaunch_gpu_temperature_celsius",
        kind=Kind.GAUGE,
        unit="celsius",
        labels=(
            GPU,
            one_of("sensor", "core"),
        ),
        help="Temperature of the GPU.",
    ),
    Metric(
        name="gpulaunch_gpu_throttle_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(
            GPU,
            one_of("reason", *THROTTLE_REASONS),
        ),
        help="Time that the clocks were kept down, by reason; several may hold at once.",
    ),
    Metric(
        name="gpulaunch_gpu_pcie_bytes_total",
        kind=Kind.COUNTER,
        unit="bytes",
        labels=(
            GPU,
            one_of("direction", *DIRECTIONS),
        ),
        help="What crossed the link, as the GPU sees it; absent where it cannot be followed.",
    ),
    Metric(
        name="gpulaunch_gpu_nvlink_bytes_total",
        kind=Kind.COUNTER,
        unit="bytes",
        labels=(
            GPU,
            one_of("direction", *DIRECTIONS),
        ),
        help="The same of NVLink, all links together.",
    ),
    Metric(
        name="gpulaunch_gpu_pcie_link_generation",
        kind=Kind.GAUGE,
        labels=(
            GPU,
            one_of("state", "now", "max"),
        ),
        help="Of the link now, and what card and slot can do; an idle link steps back by itself.",
    ),
    Metric(
        name="gpulaunch_gpu_pcie_link_width",
        kind=Kind.GAUGE,
        labels=(
            GPU,
            one_of("state", "now", "max"),
        ),
        help="Lanes of the link, likewise.",
    ),
    Metric(
        name="gpulaunch_gpu_pcie_replays_total",
        kind=Kind.COUNTER,
        labels=(GPU,),
        help="Packets that had to be sent again: a bad slot or riser.",
    ),
    Metric(
        name="gpulaunch_gpu_row_remaps_total",
        kind=Kind.COUNTER,
        labels=(
            GPU,
            one_of("kind", "correctable", "uncorrectable"),
        ),
        help="Rows of memory that were replaced in the life of the card, by the errors they had.",
    ),
    Metric(
        name="gpulaunch_gpu_row_remap_pending",
        kind=Kind.GAUGE,
        labels=(GPU,),
        help="1 while rows wait for a reset of the card to be replaced.",
    ),
    Metric(
        name="gpulaunch_gpu_row_remap_failed",
        kind=Kind.GAUGE,
        labels=(GPU,),
        help="1 if a row could not be replaced: the card should be.",
    ),
    Metric(
        name="gpulaunch_gpu_sm_active_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(GPU,),
        help="Share of time and multiprocessors with a warp on them (GPM: Hopper and newer).",
    ),
    Metric(
        name="gpulaunch_gpu_sm_occupancy_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(GPU,),
        help="Warps there were, of those there could be.",
    ),
    Metric(
        name="gpulaunch_gpu_dram_active_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(GPU,),
        help="Use of the bandwidth of its memory.",
    ),
    Metric(
        name="gpulaunch_gpu_pipe_active_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(
            GPU,
            one_of("pipe", "tensor", "fp64", "fp32", "fp16"),
        ),
        help="Use of each pipe.",
    ),
)
