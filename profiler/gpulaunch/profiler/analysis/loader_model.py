"""A model of the batch supply of a training loop: predicts the step time for another number of workers.

A step takes its own time (everything but the wait for data), and cannot be shorter than its supply allows:

    step = max(own, batches * fetch / workers, cpu / cores)

fetch: the time that one worker needs for a batch. cpu: the CPU time of all processes of all ranks of the node per step.
More workers do not change that sum, so where the cores are already full, they change nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from gpulaunch.profiler.analysis.facts import loader_of, number
from gpulaunch.profiler.analysis.thresholds import (
    BUSY,
    CROWDED,
    CROWDED_NODE,
    HANDOVER,
    LOST,
    TENSOR_S,
    TRANSFER_S,
    WORKER_PAYS_S,
)
from gpulaunch.profiler.analysis.window import RankWindow, Window

_HEADROOM: Final = 1.2
"""The advised number of workers has a fifth in reserve, because fetch times vary."""
_MOST_OF_WAIT: Final = 0.5
"""With less, the batch that is late is not why workers are idle."""
_LEAST_ADVISED: Final = 4
"""Per rank, regardless of the number of cores: workers that wait for storage need no core of their own."""


@dataclass(frozen=True, kw_only=True)
class LoaderModel:
    """The flow of batches into one rank in a window. Times in seconds per step, unless stated otherwise."""

    step_s: float
    wait_s: float
    """For batches; without the time in a sampler of the program, which no worker shortens."""
    batches: float
    """Per step: more than one where gradients are accumulated."""
    workers: int
    tensors: float = 1.0
    """In a batch that the training thread fetches."""
    fetch_s: float
    """Per batch and worker."""
    cpu_share: float
    """Share of fetch; so are the next two."""
    runqueue_share: float
    blocked_share: float
    knows_runqueue: bool
    busy_share: float
    """Share of the workers' time inside fetch."""
    sending_s: float = 0.0
    """On a core outside of fetches, per step and worker: a thread of a worker pickles its batches, and sends them."""
    trainer_cpu_s: float = 0.0
    """On a core, the rank's own process."""
    trainer_runqueue_s: float = 0.0
    """Waiting for one; 0 where the kernel does not count it, or a GPU may be waited for meanwhile."""
    node_cpu_s: float
    """On a core, all processes of all ranks of the node together."""
    cores: float | None
    pressure: float | None
    stall: str
    """The verdict of `analysis.stall`."""
    reorder_s: float = 0.0
    """The part of the wait in which batches were ready that waited for an earlier one."""
    system_share: float = 0.0
    """Of the CPU time of the rank's workers: in the kernel."""
    node_system_s: float = 0.0
    """Of `node_cpu_s`: of workers, in the kernel."""

    @classmethod
    def of(cls, rank: RankWindow, window: Window) -> LoaderModel | None:
        """Return the flow of a rank; None if there is no DataLoader, or its workers do not measure themselves."""
        loader = rank.loader
        if loader is None or not rank.steps or not rank.step_ns:
            return None
        if (trained := loader.batches - loader.eval_batches) <= 0:
            return None
        batches = trained / rank.steps
        indexing_share = rank.indexing / rank.samples if rank.samples else 0.0
        wait_s = max(0.0, rank.phase_s("data_wait") - indexing_share * rank.step_s)
        done = rank.workers
        knows_runqueue = True
        sending_s = 0.0
        if not loader.workers_configured:
            # The training thread fetches; how much of its CPU time that takes is not known: at most all of it.
            fetch_s, busy_share = wait_s / batches, 1.0
            cpu_s = rank.trainer_cpu_s / rank.steps / batches
            shares = (min(1.0, cpu_s / fetch_s) if fetch_s else 0.0, 0.0, 0.0)
        elif done is not None and done.batches and done.wall_ns:
            fetch_s = done.wall_ns / 1e9 / done.batches
            busy_share = done.wall_ns / (loader.workers_configured * rank.step_ns)
            shares = (done.cpu_ns / done.wall_ns, done.runqueue_ns / done.wall_ns, done.blocked_ns / done.wall_ns)
            knows_runqueue = done.knows_runqueue
            if not loader.epochs or loader_of(rank).get("persistent_workers") is True:  # else some of it is their start
                outside_s = max(0.0, rank.workers_cpu_s - done.cpu_ns / 1e9)
                sending_s = outside_s / rank.steps / loader.workers_configured
        else:
            return None
        return cls(
            step_s=rank.step_s,
            wait_s=wait_s,
            batches=batches,
            workers=loader.workers_configured,
            tensors=number(loader_of(rank), "tensors") or 1.0,
            fetch_s=fetch_s,
            cpu_share=shares[0],
            runqueue_share=shares[1],
            blocked_share=shares[2],
            knows_runqueue=knows_runqueue,
            busy_share=busy_share,
            sending_s=sending_s,
            trainer_cpu_s=rank.trainer_cpu_s / rank.steps,
            trainer_runqueue_s=(rank.trainer_runqueue_s or 0.0) / rank.steps if rank.gpu is None else 0.0,
            node_cpu_s=sum((each.trainer_cpu_s + _workers_cpu_s(each)) / each.steps for each in window.ranks),
            cores=window.cores,
            pressure=window.pressure("cpu"),
            stall=rank.stall.kind,
            reorder_s=rank.per_step_s(rank.stall.parts_ns.get("head_of_line", 0)),
            system_share=min(1.0, rank.workers_system_s / rank.workers_cpu_s) if rank.workers_cpu_s else 0.0,
            node_system_s=sum(each.workers_system_s / each.steps for each in window.ranks),
        )

    @property
    def own_s(self) -> float:
        """The duration of a step without the wait."""
        return max(0.0, self.step_s - self.wait_s)

    @property
    def freed_s(self) -> float:
        """The part of a step's own time in which the training thread waited for a core: gone if workers need less."""
        if not self.step_s:
            return 0.0
        return min(self.trainer_runqueue_s * self.own_s / self.step_s, max(0.0, self.own_s - self.trainer_cpu_s))

    @property
    def fed_s(self) -> float:
        """The duration of a step that waits for nothing but the workers."""
        return self.batches * self.fetch_s / max(1, self.workers)

    @property
    def is_crowded(self) -> bool:
        """Whether there is no core to spare for more fetching."""
        if self.runqueue_share > CROWDED.value:
            return True
        # Where the kernel does not separate a wait for a core from other waits, computing looks like half of it.
        computes = self.cpu_share >= (0.5 if self.knows_runqueue else 0.25)
        return computes and self.pressure is not None and self.pressure > CROWDED_NODE.value

    @property
    def others_use_cores(self) -> bool:
        """Whether other processes than ours use up the cores: then no change to the program would help."""
        if self.cores is None or self.pressure is None or self.pressure <= CROWDED_NODE.value:
            return False
        return self.node_cpu_s < BUSY.value * self.cores * self.step_s

    @property
    def kind(self) -> str:
        """What training waits for, as a kind of `analysis.stall`.

        Workers that are never idle are the bottleneck, whichever of their batches is ready first; workers that are
        sometimes idle are not, whatever they do when they work: they wait, too, for the batch that is late.
        """
        if self.stall == "none" or not self.workers:
            return self.stall
        if self.busy_share < BUSY.value:
            sends = self.sending_s >= max(HANDOVER.value, self.busy_share) * self.step_s
            if sends or self.stall == "transfer":
                return "transfer"
            is_late = self.reorder_s >= max(LOST.value * self.step_s, _MOST_OF_WAIT * self.wait_s)
            return "head_of_line" if is_late or self.stall == "head_of_line" else "none"
        if self.runqueue_share >= CROWDED.value and self.runqueue_share >= self.blocked_share:
            return "contention"
        if not self.knows_runqueue and self.is_crowded:  # waiting for a core looks like waiting for storage
            return "contention"
        return "prep" if self.cpu_share >= self.blocked_share else "fetch"

    def workers_fitting(self, ranks: int) -> float:
        """How many workers per rank find a core if `ranks` ranks share the cores and steps are as short as these allow.

        The number that feeds such steps, plus those that fit in the remaining free cores; a worker that mostly waits
        takes little of them.
        """
        best_s = self.step_with(math.inf)
        if self.capacity is None or not self.cpu_share or not best_s:
            return math.inf
        free = max(0.0, self.capacity - self.node_cpu_s / best_s)
        return self.batches * self.fetch_s / best_s + free / ranks / self.cpu_share

    def step_with(self, workers: float, fetch_s: float | None = None) -> float:
        """The step time in seconds with this number of workers (and another time per fetch)."""
        # What a worker prepares has to be sent and received, which the times of workers that there are include.
        tensors_s = (self.tensors - 1.0) * TENSOR_S.value
        received_s = 0.0 if self.workers else self.batches * (TRANSFER_S.value + tensors_s)
        fed_s = self.batches * ((self.fetch_s if fetch_s is None else fetch_s) + tensors_s) / workers
        return max(self.own_s + received_s, fed_s, self.node_cpu_s / self.capacity if self.capacity else 0.0)

    def step_on_all_cores(self) -> float:
        """The step time in seconds if the workers could run on all cores of the node: none waits for one then."""
        fed_s = self.fed_s * (1.0 - self.runqueue_share)
        return max(self.own_s, fed_s, self.node_cpu_s / self.cores if self.cores else 0.0)

    def step_from_memory(self) -> float:
        """The step time in seconds if no fetch read from storage: without what the kernel does for these reads, which
        took half of the fetches' CPU time on a virtual disk. (It copies from memory, too, but that is much faster.)"""
        fed_s = self.fed_s * self.cpu_share * (1.0 - self.system_share)
        cpu_s = max(0.0, self.node_cpu_s - self.node_system_s)
        return max(self.own_s, fed_s, cpu_s / self.capacity if self.capacity else 0.0)

    @property
    def capacity(self) -> float | None:
        """The cores that these ranks could use: those in use, and the part of the others that seems to be free.

        A worker that waits for a core shows that none was free; at the limit from which no more workers are advised,
        none is assumed to be free.
        """
        if self.cores is None or not self.step_s:
            return None
        used = self.node_cpu_s / self.step_s
        return used + max(0.0, self.cores - used) * max(0.0, 1.0 - self.runqueue_share / CROWDED.value)

    def evidence(self) -> dict[str, float | str]:
        """The figures in every finding about the loader."""
        return {
            "step_seconds": self.step_s,
            "data_wait_seconds_per_step": self.wait_s,
            "workers": self.workers,
            "fetch_seconds_per_batch": self.fetch_s,
            "fetch_cpu_ratio": self.cpu_share,
            "fetch_runqueue_ratio": self.runqueue_share,
            "fetch_blocked_ratio": self.blocked_share,
            "workers_busy_ratio": self.busy_share,
            "stall": self.kind,
        }


def _workers_cpu_s(rank: RankWindow) -> float:
    """The CPU time of a rank's workers; what they start and wait for counts only in their own measurement."""
    fetching_s = rank.workers.cpu_ns / 1e9 if rank.workers is not None else 0.0
    return max(rank.workers_cpu_s, fetching_s)


def workers_needed(supply: LoaderModel, window: Window) -> tuple[int, float] | None:
    """Return how many workers would feed this rank, and the step time with them; None if more would not help."""
    if supply.is_crowded or (not supply.workers and supply.fetch_s < WORKER_PAYS_S.value):
        return None
    ranks = max(1, len(window.ranks))
    cores_each = int((supply.cores or 0) // ranks)
    most = max(_LEAST_ADVISED, 2 * supply.workers, cores_each)
    needed = math.ceil(_HEADROOM * supply.batches * supply.fetch_s / supply.own_s) if supply.own_s else most
    # One more worker with hardly a tenth of a core would have no measurable effect.
    fitting = supply.workers_fitting(ranks) * (1.0 - LOST.value)
    workers = max(supply.workers + 1, math.ceil(min(needed, most, fitting)))
    step_s = supply.step_with(workers)
    return None if supply.step_s - step_s < LOST.value * supply.step_s else (workers, step_s)
