"""What do the GPUs do, what keeps them slow, and are they well?"""

from __future__ import annotations

from source import limits
from source.board import dashboard, row
from source.expr import Expr, highest, lowest, total
from source.parts import Json, heat, lines, table, words
from source.promql import gauge, info, rate

__all__ = ["gpus"]


def _each(name: str, *more: str) -> Expr:
    """A gauge by GPU; the same number on several nodes: the node tells them apart."""
    return highest(gauge(name), "instance", "gpu", *more)


def gpus() -> Json:
    """Make the dashboard."""
    timed = total(rate("gpulaunch_gpu_timed_steps_total"))
    memory = "gpulaunch_gpu_device_memory_bytes"
    here = ("instance", "gpu")
    return dashboard(
        "gpus",
        "GPUs",
        "What do the GPUs do, what keeps them slow, and are they well?",
        row(
            "About this page",
            words(
                "Everything here needs a GPU",
                "Says why all panels are empty for a job on the CPU.",
                "A job on the CPU has none of this. The figures of multiprocessors and pipes need Hopper or newer;"
                " others that a card or a MIG instance cannot give are absent, never zero.",
            ),
        ),
        row(
            "What do they do?",
            heat(
                "Multiprocessors with work",
                "Share of time and multiprocessors with a warp on them, by GPU.",
                (_each("gpulaunch_gpu_sm_active_ratio"), "{{instance}} {{gpu}}"),
                limit=limits.COMPARED,
            ),
            lines(
                "Utilization",
                "Share of the last second at most in which at least one kernel ran, however small: high says little.",
                (_each("gpulaunch_gpu_utilization_ratio"), "{{instance}} {{gpu}}"),
                most=1,
                limit=limits.IDLE,
            ),
            lines(
                "Pipes",
                "Use of each kind of arithmetic, the highest of all GPUs. Matrix work that does not use the tensor pipe"
                " is slow: 16 bit, or TF32.",
                (highest(gauge("gpulaunch_gpu_pipe_active_ratio"), "pipe"), "{{pipe}}"),
                most=1,
                limit=limits.PIPES,
            ),
            lines(
                "Occupancy",
                "Warps there were, of those there could be.",
                (_each("gpulaunch_gpu_sm_occupancy_ratio"), "{{instance}} {{gpu}}"),
                most=1,
                width=8,
                limit=limits.OCCUPANCY,
            ),
            lines(
                "Memory bandwidth",
                "Use of the bandwidth of the GPU's memory.",
                (_each("gpulaunch_gpu_dram_active_ratio"), "{{instance}} {{gpu}}"),
                most=1,
                width=8,
                limit=limits.OCCUPANCY,
            ),
            lines(
                "Memory",
                "Of the GPU, used by whomever, of all that it has.",
                (
                    highest(gauge(memory, state="used"), *here) / highest(gauge(memory, state="total"), *here),
                    "{{instance}} {{gpu}}",
                ),
                most=1,
                width=8,
                limit=limits.GPU_FULL,
            ),
            lines(
                "Where the time of a step goes on the GPU",
                "Seconds of a step, of those steps that were timed there: a few, so that it costs little.",
                (total(rate("gpulaunch_phase_gpu_seconds_total"), "phase").each_of_all(timed), "{{phase}}"),
                stacked=True,
                width=24,
                limit=limits.PACE,
            ),
            gpu=True,
        ),
        row(
            "What keeps them slow?",
            lines(
                "Clock",
                "Of the multiprocessors: it falls with heat, with power, and when there is nothing to do.",
                (_each("gpulaunch_gpu_clock_hertz"), "{{instance}} {{gpu}}"),
                width=8,
                limit=limits.HARDWARE,
            ),
            lines(
                "Throttled",
                "Share of the time that the clocks were kept down, by reason; several may hold at once. The worst GPU.",
                (highest(rate("gpulaunch_gpu_throttle_seconds_total"), "reason"), "{{reason}}"),
                width=8,
                limit=limits.THROTTLED,
            ),
            lines(
                "Temperature",
                "Of each GPU.",
                (_each("gpulaunch_gpu_temperature_celsius"), "{{instance}} {{gpu}}"),
                width=8,
                limit=limits.HOT,
            ),
            lines(
                "Power",
                "What each GPU draws.",
                (_each("gpulaunch_gpu_power_watts"), "{{instance}} {{gpu}}"),
                width=8,
                limit=limits.HARDWARE,
            ),
            lines(
                "Energy of a step",
                "What all GPUs use for one step of the run; a rank that makes none does not count.",
                (
                    total(rate("gpulaunch_gpu_energy_joules_total")).each(lowest(rate("gpulaunch_steps_total") > 0)),
                    "energy",
                ),
                width=8,
                limit=limits.PACE,
            ),
            lines(
                "Across NVLink",
                "All links of a GPU together, by direction.",
                (
                    total(rate("gpulaunch_gpu_nvlink_bytes_total"), "gpu", "direction"),
                    "GPU {{gpu}} {{direction}}",
                ),
                width=8,
                limit=limits.HARDWARE,
            ),
            gpu=True,
        ),
        row(
            "Are they well?",
            lines(
                "Memory errors",
                "Since the driver was loaded. Corrected ones are harmless unless they are many.",
                (
                    highest(gauge("gpulaunch_gpu_ecc_errors_total"), *here, "severity"),
                    "{{instance}} {{gpu}} {{severity}}",
                ),
                limit=limits.ONCE,
            ),
            lines(
                "Rows replaced",
                "Rows of memory that were replaced in the life of the card, by the errors they had.",
                (highest(gauge("gpulaunch_gpu_row_remaps_total"), *here, "kind"), "{{instance}} {{gpu}} {{kind}}"),
                limit=limits.ROWS,
            ),
            lines(
                "Rows not replaced",
                "1 while rows wait for a reset of the card, or could not be replaced: then the card should be.",
                (_each("gpulaunch_gpu_row_remap_pending"), "{{instance}} {{gpu}} wait"),
                (_each("gpulaunch_gpu_row_remap_failed"), "{{instance}} {{gpu}} failed"),
                limit=limits.FAULT,
            ),
            lines(
                "Packets sent again",
                "Across PCIe, by second: a bad slot or riser.",
                (total(rate("gpulaunch_gpu_pcie_replays_total"), *here), "{{instance}} {{gpu}}"),
                limit=limits.AGAIN,
            ),
            table(
                "Critical errors",
                "Xid errors that the driver reported since the run began, by number in NVIDIA's catalogue. Empty:"
                " none.",
                highest(gauge("gpulaunch_gpu_xid_errors_total"), *here, "xid"),
                {"instance": "node", "gpu": "GPU", "xid": "Xid", "Value": "errors"},
                limit=limits.FAULT,
            ),
            table(
                "Cards",
                "The GPUs of the run's nodes.",
                highest(info("gpulaunch_gpu_info"), *here, "model", "uuid", "parent"),
                {"instance": "node", "gpu": "GPU", "model": "model", "uuid": "UUID", "parent": "part of"},
                limit=limits.LISTED,
            ),
            gpu=True,
        ),
    )
