"""Who has the memory, does it grow, and how much is left?"""

from __future__ import annotations

from source import limits
from source.board import dashboard, row
from source.expr import Expr, highest, spread, top, total
from source.parts import Json, figure, heat, lines
from source.promql import gauge, rate

__all__ = ["memory"]

NODE, SHM, CGROUP = "gpulaunch_node_memory_bytes", "gpulaunch_shm_bytes", "gpulaunch_cgroup_memory_bytes"
HOST, ON_GPU = "gpulaunch_host_memory_bytes", "gpulaunch_gpu_memory_bytes"


def _on_node(name: str, state: str) -> Expr:
    """By node; the highest, as a node is one however often it is scraped."""
    return highest(gauge(name, state=state), "instance")


def memory() -> Json:
    """Make the dashboard."""
    return dashboard(
        "memory",
        "Memory",
        "Who has the memory, does it grow, and how much is left: of the nodes, in shared memory, on the GPUs?",
        row(
            "How much is left?",
            figure(
                "Memory of the nodes in use",
                "What programs cannot get any more, of all that the node has; the fullest node.",
                (
                    highest(
                        (_on_node(NODE, "total") - _on_node(NODE, "available")) / _on_node(NODE, "total"),
                    ),
                    "in use",
                ),
                width=6,
                limit=limits.NODE_FULL,
            ),
            figure(
                "Shared memory in use",
                "Of the fullest node (/dev/shm), which carries batches from workers to ranks. Full: a bus error.",
                (highest(_on_node(SHM, "used") / _on_node(SHM, "size")), "in use"),
                width=6,
                limit=limits.SHM_FULL,
            ),
            figure(
                "Of the control group's limit",
                "What the job has, of what its control group may have. Full: the kernel kills. No data: no limit.",
                (highest(_on_node(CGROUP, "used") / _on_node(CGROUP, "limit")), "in use"),
                width=6,
                limit=limits.NODE_FULL,
            ),
            figure(
                "Swapped out",
                "Memory of the nodes that was swapped out: training that swaps stands still.",
                (total(gauge(NODE, state="swap_used")), "swapped"),
                width=6,
                limit=limits.SWAPPED,
            ),
        ),
        row(
            "Who has it?",
            lines(
                "Ranks and their workers",
                "Proportional: memory that processes share is divided among them, so that this may be added up. All"
                " ranks.",
                (total(gauge(HOST, kind="pss"), "role"), "{{role}}"),
                stacked=True,
                limit=limits.SIZE,
            ),
            lines(
                "The five largest ranks",
                "Resident memory of a rank's process, without its workers. One that grows for hours leaks.",
                (top(5, highest(gauge(HOST, kind="rss", role="trainer"), "rank")), "rank {{rank}}"),
                limit=limits.SIZE,
            ),
            heat(
                "By rank",
                "Proportional memory of a rank and its workers.",
                (total(gauge(HOST, kind="pss"), "rank"), "{{rank}}"),
                limit=limits.COMPARED,
            ),
            lines(
                "Nodes",
                "Memory of all nodes: available, and what holds files (which programs can get).",
                (total(gauge(NODE), "state"), "{{state}}"),
                width=8,
                limit=limits.TOTALS,
            ),
            lines(
                "Control groups",
                "What the control group of the job has and may have; no data without a limit.",
                (total(gauge(CGROUP), "state"), "{{state}}"),
                width=8,
                limit=limits.TOTALS,
            ),
            lines(
                "Shared memory",
                "Of the nodes (/dev/shm), and what carries batches to ranks now.",
                (total(gauge(SHM), "state"), "{{state}}"),
                (total(gauge("gpulaunch_shm_inflight_bytes")), "batches"),
                width=8,
                limit=limits.TOTALS,
            ),
        ),
        row(
            "Does anybody wait?",
            lines(
                "Pressure",
                "Share of the time in which some tasks of the nodes, or all, lacked memory, cores or storage, as the"
                " kernel counts it; the worst node.",
                (
                    highest(rate("gpulaunch_node_pressure_seconds_total"), "resource", "severity"),
                    "{{resource}} {{severity}}",
                ),
                width=24,
                limit=limits.PRESSURE,
            ),
        ),
        row(
            "GPUs",
            lines(
                "torch's allocator",
                "Of all ranks. reserved: taken from the GPU; allocated: in use; inactive_split: free, and in pieces.",
                (
                    total(gauge(ON_GPU, state=("reserved", "allocated", "active", "inactive_split")), "state"),
                    "{{state}}",
                ),
                limit=limits.SIZE_GPU,
            ),
            lines(
                "Highest so far",
                "The peak of the rank with most of it, and the memory of the fullest GPU.",
                (highest(gauge(ON_GPU, state="peak_allocated")), "allocated"),
                (highest(gauge(ON_GPU, state="peak_reserved")), "reserved"),
                (highest(gauge("gpulaunch_gpu_device_memory_bytes", state="used")), "the GPU's, used"),
                limit=limits.SIZE_GPU,
            ),
            lines(
                "Reserved and not usable",
                "Share of what torch holds that is free, and in pieces: fragmentation.",
                *spread(
                    highest(gauge(ON_GPU, state="inactive_split"), "rank")
                    / highest(gauge(ON_GPU, state="reserved"), "rank")
                ),
                width=8,
                limit=limits.FRAGMENTED,
            ),
            lines(
                "Trouble",
                "Times that all cached memory was given back before an allocation succeeded, and allocations that"
                " failed, in this run.",
                (total(gauge("gpulaunch_gpu_alloc_retries_total")), "given back"),
                (total(gauge("gpulaunch_gpu_ooms_total")), "failed"),
                width=8,
                limit=limits.ONCE,
            ),
            lines(
                "Pinned",
                "Host memory that torch holds pinned, of all ranks: nothing else can have it.",
                (total(gauge("gpulaunch_pinned_memory_bytes")), "pinned"),
                width=8,
                limit=limits.SIZE,
            ),
            gpu=True,
        ),
    )
