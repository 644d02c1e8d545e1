"""Classifies data stalls: what training waits for when it waits for data.

The first two terms are those of "Analyzing and Mitigating Data Stalls in DNN Training" (VLDB 2021). There they are
separated by running a program three times, here by the kernel's figures of the workers while they work.

    prep           the samples are in memory, and preparing them takes the cores
    fetch          workers are blocked: storage, a network, a lock
    contention     workers are ready to run, but there is no core for them
    transfer       batches are ready, but transferring them takes long: unpickling, mapping, pinning
    head_of_line   batches are ready, but wait for an earlier one
    no_workers     no prefetching: the training thread fetches every batch itself
    none           there is hardly any wait, or its cause is not known
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

StallKind = Literal["none", "prep", "fetch", "contention", "transfer", "head_of_line", "no_workers"]

_OF_THE_QUEUE: Final[tuple[StallKind, StallKind]] = ("transfer", "head_of_line")

LEAST_SHARE: Final = 0.02
"""Of the step; a shorter wait is the overhead of the queue itself and is not classified."""

CROWDED_SHARE: Final = 0.3
"""Of the workers' fetch time: with this much in the run queue there are too few cores, though computing may still
take more. On two cores, two workers of a purely computing dataset measured 0.49, one measured 0.12."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Why training waited for data, and for how long."""

    kind: StallKind
    share: float
    """The share of all step time that training waited for data."""
    parts_ns: Mapping[StallKind, int]
    """The wait by kind; they sum to it. Unknown parts are "none"."""


def verdict(
    *,
    step_ns: int,
    data_wait_ns: int,
    loader_wait_ns: int,
    transfer_ns: int,
    reorder_ns: int,
    workers: int,
    cpu_ns: int,
    runqueue_ns: int,
    blocked_ns: int,
) -> Stall:
    """Return the verdict on one rank in one window.

    Args:
        step_ns: total duration of its steps.
        data_wait_ns: of that, the phase data_wait.
        loader_wait_ns: the training thread's wait in dataloaders, evaluation included; the next two are parts of it.
        transfer_ns: a batch was ready.
        reorder_ns: batches were ready that waited for an earlier one.
        workers: configured number of workers of the dataloader.
        cpu_ns: the workers' time on a core in fetches; the next two are in fetches, too.
        runqueue_ns: in the run queue.
        blocked_ns: blocked.
    """
    share = data_wait_ns / step_ns if step_ns > 0 else 0.0
    if not workers:
        kind: StallKind = "no_workers" if share >= LEAST_SHARE else "none"
        return Stall(kind=kind, share=share, parts_ns={kind: data_wait_ns})
    parts_ns = _parts(data_wait_ns, loader_wait_ns, transfer_ns, reorder_ns, (cpu_ns, runqueue_ns, blocked_ns))
    return Stall(kind=_kind(parts_ns) if share >= LEAST_SHARE else "none", share=share, parts_ns=parts_ns)


def _parts(
    wait_ns: int, loader_wait_ns: int, transfer_ns: int, reorder_ns: int, fetching_ns: tuple[int, int, int]
) -> dict[StallKind, int]:
    """Split the wait: by the state of the queue, and the rest by where the workers' time went."""
    cpu_ns, runqueue_ns, _ = fetching_ns
    all_ns = sum(fetching_ns)
    if runqueue_ns >= CROWDED_SHARE * all_ns > 0:
        reorder_ns = 0  # a worker without a core is late with its batch; the order is not a separate cause
    trains = wait_ns / max(wait_ns, loader_wait_ns, 1)
    reorder_ns = min(wait_ns, int(reorder_ns * trains))
    transfer_ns = min(wait_ns - reorder_ns, int(transfer_ns * trains))
    awaited_ns = wait_ns - reorder_ns - transfer_ns
    if not all_ns:
        return {"transfer": transfer_ns, "head_of_line": reorder_ns, "none": awaited_ns}
    prep_ns = awaited_ns * cpu_ns // all_ns
    contention_ns = awaited_ns * runqueue_ns // all_ns
    return {
        "prep": prep_ns,
        "fetch": awaited_ns - prep_ns - contention_ns,
        "contention": contention_ns,
        "transfer": transfer_ns,
        "head_of_line": reorder_ns,
    }


def _kind(parts_ns: Mapping[StallKind, int]) -> StallKind:
    """Return the largest cause: first between the queue and the workers, then among the workers' causes."""
    workers_ns: dict[StallKind, int] = {kind: ns for kind, ns in parts_ns.items() if kind not in _OF_THE_QUEUE}
    awaited_ns = sum(workers_ns.values())
    queued = max(_OF_THE_QUEUE, key=lambda kind: parts_ns[kind])
    if parts_ns[queued] > awaited_ns:
        return queued
    contention_ns = workers_ns.get("contention", 0)
    if contention_ns >= CROWDED_SHARE * awaited_ns and contention_ns >= workers_ns.get("fetch", 0):
        return "contention"
    return max(workers_ns, key=lambda kind: workers_ns[kind])
