"""Does training wait for data, and what do the workers do meanwhile?"""

from __future__ import annotations

from source import limits
from source.board import dashboard, row
from source.expr import highest, lowest, mean, spread, total
from source.overview import stepping_s
from source.parts import Json, figure, heat, lines
from source.promql import gauge, quantile, rate, seconds_counted

__all__ = ["dataloader"]

WAIT = "gpulaunch_dataloader_wait_seconds"


def dataloader() -> Json:
    """Make the dashboard."""
    data_wait = total(rate("gpulaunch_phase_seconds_total", phase="data_wait"), "rank") / stepping_s("rank")
    fetching = "gpulaunch_dataloader_worker_seconds_total"
    read = "gpulaunch_dataloader_worker_read_bytes_total"
    return dashboard(
        "dataloader",
        "Dataloader",
        "Does training wait for data, and why: preparing takes the cores, workers wait for storage, there are no cores,"
        " or batches are ready and do not come across.",
        row(
            "Does training wait?",
            figure(
                "Waiting for data",
                "Share of the steps' time that the training loop waited for a batch: the rank with most of it.",
                (highest(data_wait), "of the step"),
                limit=limits.DATA,
            ),
            figure(
                "Batches ready",
                "Batches ready when the training loop last asked for one, in the rank with fewest. Mostly 0: the loader"
                " is too slow.",
                (lowest(gauge("gpulaunch_dataloader_ready_batches")), "batches"),
                limit=limits.READY,
            ),
            figure(
                "Batches per second",
                "Batches handed to all training loops.",
                (total(rate("gpulaunch_dataloader_batches_total")), "batches"),
                limit=limits.PACE,
            ),
            figure(
                "Size of a batch",
                "Bytes of the tensors in a batch.",
                (
                    total(rate("gpulaunch_dataloader_batch_bytes_total")).each(
                        total(rate("gpulaunch_dataloader_batches_total"))
                    ),
                    "bytes",
                ),
                limit=limits.SIZE_BATCH,
            ),
            figure(
                "Workers",
                "Dataloader workers of all ranks that live now.",
                (total(gauge("gpulaunch_dataloader_workers", state="alive")), "alive"),
                limit=limits.COUNT,
            ),
            figure(
                "Validation",
                "Batches handed out in a second while gradients were off.",
                (total(rate("gpulaunch_dataloader_eval_batches_total")), "batches"),
                limit=limits.PACE,
            ),
            heat(
                "Waiting for data, by rank",
                "Share of the steps' time that each rank's training loop waited for a batch.",
                (data_wait, "{{rank}}"),
                limit=limits.COMPARED,
            ),
            lines(
                "How long a batch is waited for",
                "Of all ranks, from the buckets of a histogram.",
                (quantile(0.5, WAIT), "50 %"),
                (quantile(0.95, WAIT), "95 %"),
                (quantile(0.99, WAIT), "99 %"),
                limit=limits.OF_A_STEP,
            ),
            lines(
                "Waits by what the queue showed",
                "Share of all ranks' time. Ready: batches were there, and had to be unpickled, mapped or pinned. Behind"
                " another: later batches were there. Both are parts of all.",
                (mean(seconds_counted(WAIT, "rank")), "all"),
                (mean(rate("gpulaunch_dataloader_transfer_seconds_total")), "ready"),
                (mean(rate("gpulaunch_dataloader_reorder_blocked_seconds_total")), "behind another"),
                limit=limits.DATA,
            ),
        ),
        row(
            "What do the workers do?",
            lines(
                "Time of the workers, by what they do in fetches",
                "Seconds by second, of all ranks' workers. prep: on a core. contention: waiting for a core; more"
                " workers make it worse. blocked: waiting for storage, a network, a lock.",
                (total(rate(fetching), "state"), "{{state}}"),
                stacked=True,
                limit=limits.TOTALS,
            ),
            lines(
                "Shares of that",
                "What workers do while they fetch, as shares of it; collate is making a batch of samples, a part of"
                " the others.",
                (total(rate(fetching), "state").over(total(rate(fetching))), "{{state}}"),
                (
                    total(rate("gpulaunch_dataloader_worker_collate_seconds_total")) / total(rate(fetching)),
                    "collate",
                ),
                most=1,
                limit=limits.SHARES,
            ),
            lines(
                "Read by workers",
                "From a device or a network file system, or from memory. Much from storage with workers blocked: the"
                " storage is slow.",
                (total(rate(read), "source"), "{{source}}"),
                limit=limits.TOTALS,
            ),
            lines(
                "Workers",
                "Of all ranks: as the loaders were told, and processes that live now.",
                (total(gauge("gpulaunch_dataloader_workers"), "state"), "{{state}}"),
                limit=limits.COUNT,
            ),
        ),
        row(
            "The queue",
            lines(
                "Batches ready when one is asked for",
                "Mostly 0 in the lowest rank: its loader is too slow.",
                *spread(highest(gauge("gpulaunch_dataloader_ready_batches"), "rank")),
                width=8,
                limit=limits.READY,
            ),
            lines(
                "Batches asked of the workers",
                "And not yet handed out: prefetch_factor times the workers, when all goes well.",
                *spread(highest(gauge("gpulaunch_dataloader_outstanding_batches"), "rank")),
                width=8,
                limit=limits.COUNT,
            ),
            lines(
                "Batches that wait",
                "Of all ranks: finished ones behind an earlier one (see in_order of torch's DataLoader), and ones that"
                " the thread that pins has not delivered.",
                (total(gauge("gpulaunch_dataloader_reorder_blocked_batches")), "behind another"),
                (total(gauge("gpulaunch_dataloader_pin_backlog_batches")), "to be pinned"),
                width=8,
                limit=limits.TOTALS,
            ),
        ),
    )
