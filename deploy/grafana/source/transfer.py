"""What crosses between CPU and GPU, how, and what does the program stand still for?"""

from __future__ import annotations

from source import limits
from source.board import dashboard, row
from source.expr import highest, lowest, spread, total
from source.parts import Json, figure, lines, words
from source.promql import gauge, increase, rate

__all__ = ["transfer"]


def transfer() -> Json:
    """Make the dashboard."""
    moved, blocked = "gpulaunch_copy_bytes_total", "gpulaunch_copy_blocked_seconds_total"
    on_gpu, waited = "gpulaunch_copy_gpu_seconds_total", "gpulaunch_sync_blocked_seconds_total"
    steps = total(rate("gpulaunch_steps_total"))
    return dashboard(
        "transfer",
        "CPU and GPU",
        "What crosses between CPU and GPU, from which memory, and what does the program stand still for?",
        row(
            "About this page",
            words(
                "Everything here needs a GPU",
                "Says why all panels are empty for a job on the CPU.",
                "A job on the CPU copies nothing to a GPU and waits for none: all panels below say so. Copies and syncs"
                " are told by line of the program in the run's report.",
            ),
        ),
        row(
            "Copies",
            figure(
                "Pageable, of what went to the GPU",
                "Share of the bytes copied to the GPU from memory that was not pinned, in the time looked at. Those"
                " copies are slower, and the program waits for them; see pin_memory of torch's DataLoader.",
                (
                    total(increase(moved, direction="h2d", host_memory="pageable"))
                    / total(increase(moved, direction="h2d")),
                    "pageable",
                ),
                width=6,
                limit=limits.PAGEABLE,
            ),
            figure(
                "Standing still for copies",
                "Share of its time that the rank with most of it stood still for copies.",
                (highest(total(rate(blocked), "rank")), "of the time"),
                width=6,
                limit=limits.STANDING,
            ),
            figure(
                "Standing still for syncs",
                "Share of its time that the rank with most of it waited for the GPU in calls such as item().",
                (highest(total(rate(waited), "rank")), "of the time"),
                width=6,
                limit=limits.STANDING,
            ),
            figure(
                "Syncs in a step",
                "Calls that made the program wait for the GPU, in each step of each rank. 1 or more: the GPU idles at"
                " every step.",
                (total(rate("gpulaunch_sync_calls_total")).each(steps), "calls"),
                width=6,
                limit=limits.SYNCS,
            ),
            lines(
                "Copied",
                "Bytes by direction and kind of host memory, of all ranks. h2d: to the GPU; d2h: from it; d2d: on it.",
                (total(rate(moved), "direction", "host_memory"), "{{direction}} {{host_memory}}"),
                limit=limits.TOTALS,
            ),
            lines(
                "Copies",
                "How many, likewise: many small ones cost more than few large ones.",
                (
                    total(rate("gpulaunch_copies_total"), "direction", "host_memory"),
                    "{{direction}} {{host_memory}}",
                ),
                limit=limits.TOTALS,
            ),
            lines(
                "Speed of copies",
                "Bytes by second of copying on the GPU. Pageable copies reach a part of what the link can do.",
                (
                    total(rate(moved), "direction", "host_memory") / total(rate(on_gpu), "direction", "host_memory"),
                    "{{direction}} {{host_memory}}",
                ),
                limit=limits.HARDWARE,
            ),
            lines(
                "Standing still for copies, by kind",
                "Seconds by second, of all ranks.",
                (total(rate(blocked), "direction", "host_memory"), "{{direction}} {{host_memory}}"),
                stacked=True,
                limit=limits.TOTALS,
            ),
            gpu=True,
        ),
        row(
            "Waiting for the GPU",
            lines(
                "Syncs",
                "Calls by kind, of all ranks.",
                (total(rate("gpulaunch_sync_calls_total"), "kind"), "{{kind}}"),
                width=8,
                limit=limits.TOTALS,
            ),
            lines(
                "Standing still for syncs, by kind",
                "Seconds by second, of all ranks.",
                (total(rate(waited), "kind"), "{{kind}}"),
                stacked=True,
                width=8,
                limit=limits.TOTALS,
            ),
            lines(
                "Standing still for syncs, by rank",
                "Share of each rank's time.",
                *spread(total(rate(waited), "rank")),
                width=8,
                limit=limits.STANDING,
            ),
            gpu=True,
        ),
        row(
            "The link",
            lines(
                "Across PCIe",
                "As the GPUs see it, by direction: receive is to the GPU.",
                (total(rate("gpulaunch_gpu_pcie_bytes_total"), "gpu", "direction"), "GPU {{gpu}} {{direction}}"),
                width=8,
                limit=limits.HARDWARE,
            ),
            lines(
                "Seen of it",
                "What the copies of the program have moved, of all that crossed the link. Far below 1: something copies"
                " that is not seen.",
                (
                    lowest(gauge("gpulaunch_copy_coverage_ratio"), "gpu", "direction"),
                    "GPU {{gpu}} {{direction}}",
                ),
                width=8,
                limit=limits.SEEN,
            ),
            lines(
                "Width of the link, of what it could be",
                "Lanes now, of those that card and slot have. Below 1 under load: a bad slot or riser. The generation"
                " likewise; an idle link steps back by itself.",
                (
                    lowest(gauge("gpulaunch_gpu_pcie_link_width", state="now"), "gpu")
                    / lowest(gauge("gpulaunch_gpu_pcie_link_width", state="max"), "gpu"),
                    "GPU {{gpu}} width",
                ),
                (
                    lowest(gauge("gpulaunch_gpu_pcie_link_generation", state="now"), "gpu")
                    / lowest(gauge("gpulaunch_gpu_pcie_link_generation", state="max"), "gpu"),
                    "GPU {{gpu}} generation",
                ),
                width=8,
                most=1,
                limit=limits.LINK,
            ),
            gpu=True,
        ),
    )
