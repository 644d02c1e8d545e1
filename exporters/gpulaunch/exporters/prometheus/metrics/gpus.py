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
        help="Critical errors reported by the driver for this GPU since the start of the run, by number in NVIDIA's"
        " Xid catalog, or other (the kernel log has the number); absent if there are none.",
    ),
    Metric(
        name="gpulaunch_gpu_ecc_errors_total",
        kind=Kind.COUNTER,
        labels=(GPU, one_of("severity", "corrected", "uncorrected")),
        help="Memory errors since the driver was loaded; absent if ECC is disabled or not supported.",
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
        help="A GPU of the node, or a MIG instance: for GPU instance 7 of GPU 0, `gpu` is 0.7, and parent is the UUID"
        " of GPU 0.",
    ),
    Metric(
        name="gpulaunch_gpu_utilization_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(GPU,),
        help="Share of the driver's sample period (at most 1 s) in which at least one kernel was running.",
    ),
    Metric(
        name="gpulaunch_gpu_device_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(
            GPU,
            one_of("state", "used", "total"),
        ),
        help="Memory of the GPU, used by all processes; see gpulaunch_gpu_memory_bytes for the ranks.",
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
        help="Current power draw of the GPU.",
    ),
    Metric(
        name="gpulaunch_gpu_energy_joules_total",
        kind=Kind.COUNTER,
        unit="joules",
        labels=(GPU,),
        help="Energy consumed by the GPU since the start of the run.",
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
        help="Time in which the clocks were throttled, by reason; several may apply at the same time.",
    ),
    Metric(
        name="gpulaunch_gpu_pcie_bytes_total",
        kind=Kind.COUNTER,
        unit="bytes",
        labels=(
            GPU,
            one_of("direction", *DIRECTIONS),
        ),
        help="Bytes transferred over the PCIe link, from the GPU's point of view; absent if unavailable.",
    ),
    Metric(
        name="gpulaunch_gpu_nvlink_bytes_total",
        kind=Kind.COUNTER,
        unit="bytes",
        labels=(
            GPU,
            one_of("direction", *DIRECTIONS),
        ),
        help="Bytes transferred over NVLink, all links together.",
    ),
    Metric(
        name="gpulaunch_gpu_pcie_link_generation",
        kind=Kind.GAUGE,
        labels=(
            GPU,
            one_of("state", "now", "max"),
        ),
        help="PCIe generation of the link, current and maximum for GPU and slot; an idle link uses a lower one.",
    ),
    Metric(
        name="gpulaunch_gpu_pcie_link_width",
        kind=Kind.GAUGE,
        labels=(
            GPU,
            one_of("state", "now", "max"),
        ),
        help="Number of PCIe lanes of the link, current and maximum for GPU and slot.",
    ),
    Metric(
        name="gpulaunch_gpu_pcie_replays_total",
        kind=Kind.COUNTER,
        labels=(GPU,),
        help="PCIe packets that were retransmitted, which indicates a faulty slot or riser.",
    ),
    Metric(
        name="gpulaunch_gpu_row_remaps_total",
        kind=Kind.COUNTER,
        labels=(
            GPU,
            one_of("kind", "correctable", "uncorrectable"),
        ),
        help="Memory rows remapped in the lifetime of the GPU, by kind of error.",
    ),
    Metric(
        name="gpulaunch_gpu_row_remap_pending",
        kind=Kind.GAUGE,
        labels=(GPU,),
        help="1 if memory rows will be remapped at the next reset of the GPU.",
    ),
    Metric(
        name="gpulaunch_gpu_row_remap_failed",
        kind=Kind.GAUGE,
        labels=(GPU,),
        help="1 if a memory row could not be remapped: replace the GPU.",
    ),
    Metric(
        name="gpulaunch_gpu_sm_active_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(GPU,),
        help="Share of time in which a multiprocessor had at least one warp, averaged (GPM: Hopper and newer).",
    ),
    Metric(
        name="gpulaunch_gpu_sm_occupancy_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(GPU,),
        help="Resident warps divided by the maximum number of warps.",
    ),
    Metric(
        name="gpulaunch_gpu_dram_active_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(GPU,),
        help="Utilization of the memory bandwidth.",
    ),
    Metric(
        name="gpulaunch_gpu_pipe_active_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(
            GPU,
            one_of("pipe", "tensor", "fp64", "fp32", "fp16"),
        ),
        help="Utilization of each pipe.",
    ),
)
