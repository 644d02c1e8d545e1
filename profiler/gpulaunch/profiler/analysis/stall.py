"""What training waits for when it waits for data.

The first two words are those of "Analyzing and Mitigating Data Stalls in DNN Training" (VLDB 2021). There they are told
apart by running a program three times, here by what the kernel says of the workers while they work.

    prep           the samples are in memory, and preparing them takes the cores
    fetch          workers stand still: storage, a network, a lock
    contention     workers are ready to run, and there is no core for them
    transfer       batches are ready, and getting them across takes long: unpickling, mapping, pinning
    head_of_line   batches are ready, and wait for an earlier one
    no_workers     nobody works ahead: the training thread fetches every batch itself
    none           hardly anything is waited for; or it is not known what
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

StallKind = Literal["none", "prep", "fetch", "contention", "transfer", "head_of_line", "no_workers"]

_OF_THE_QUEUE: Final[tuple[StallKind, StallKind]] = ("transfer", "head_of_line")

LEAST_SHARE: Final = 0.02
"""Of the step; what is waited less is what the queue itself takes, and not worth a name."""

CROWDED_SHARE: Final = 0.3
"""Of the workers' fetching: with this much in the run queue the cores are what is short, though computing may still
take more. On two cores, two workers of a purely computing dataset measured 0.49, one measured 0.12."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Why training waited for data, and for how long."""

    kind: StallKind
    share: float
    """Of the time of all steps, training waited for data."""
    parts_ns: Mapping[StallKind, int]
    """The wait by kind; they sum to it. What is not known to be any of them is "none"."""


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
    """Give the verdict on one rank in one window.

    Args:
        step_ns: what its steps took.
        data_wait_ns: of that, the phase data_wait.
        loader_wait_ns: what the training thread stood in dataloaders, evaluation included; the next two are of it.
        transfer_ns: a batch was ready.
        reorder_ns: batches were there that waited for an earlier one.
        workers: that the dataloader is set up with.
        cpu_ns: what the workers spent in fetches on a core; the next two are in fetches, too.
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
    """Take the wait apart: by what the queue showed, and what is left by where the workers' time went."""
    cpu_ns, runqueue_ns, _ = fetching_ns
    all_ns = sum(fetching_ns)
    if runqueue_ns >= CROWDED_SHARE * all_ns > 0:
        reorder_ns = 0  # a worker without a core is late with its batch; that another's is there is no cause of its own
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
    """Give what held training up most: first between the queue and the workers, then between the workers' reasons."""
    workers_ns: dict[StallKind, int] = {kind: ns for kind, ns in parts_ns.items() if kind not in _OF_THE_QUEUE}
    awaited_ns = sum(workers_ns.values())
    queued = max(_OF_THE_QUEUE, key=lambda kind: parts_ns[kind])
    if parts_ns[queued] > awaited_ns:
        return queued
    contention_ns = workers_ns.get("contention", 0)
    if contention_ns >= CROWDED_SHARE * awaited_ns and contention_ns >= workers_ns.get("fetch", 0):
        return "contention"
    return max(workers_ns, key=lambda kind: workers_ns[kind])
