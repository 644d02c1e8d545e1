"""Data types of a window: what happened on one node between two snapshots. Rules see nothing else.

A `Snapshot` is the node's state plus what is known of the node from elsewhere. A `Window` is the difference of two
snapshots: counts and times are of the window alone, gauges are those of its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpulaunch.profiler.analysis.stall import Stall
from gpulaunch.profiler.record import (
    CopyTotals,
    GpuMemory,
    GpuState,
    GpuTime,
    HostState,
    LoaderState,
    LoaderWorkers,
    NodeState,
    Pauses,
    Site,
    bare_uuid,
)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The node at one instant."""

    state: NodeState
    samples: Mapping[int, int] = field(default_factory=dict[int, int])
    """Stack samples of steps so far, by rank."""
    logged: Mapping[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    """Those of them inside logging, by rank and the program's line; see `tally.Tally`."""
    calling: Mapping[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    """Those of them in other calls outside of the model's compute."""
    after_step: Mapping[tuple[int, str], str] = field(default_factory=dict[tuple[int, str], str])
    """What these lines are a part of that runs after a step; see `tally.Tally`."""
    innermost: Mapping[tuple[int, str, str], int] = field(default_factory=dict[tuple[int, str, str], int])
    """Those of them whose innermost line calls nothing written in Python, by rank, that line, and the line that counts
    for them in `calling`; empty: none does."""
    holding_gil: frozenset[tuple[int, str]] = frozenset()
    """Lines of these that always hold the GIL: they compute without torch's operations."""
    before_backward: Mapping[int, int] = field(default_factory=dict[int, int])
    """Those of them before backward, by rank."""
    looping: Mapping[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    """Those of these in a loop inside a step that one operation could replace, by rank and the loop's first line."""
    loop_ends: Mapping[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    """The numbers of the last lines of these loops."""
    indexing: Mapping[int, int] = field(default_factory=dict[int, int])
    """Those of them in a sampler that a dataloader asks for indices, by rank."""
    saving: Mapping[int, int] = field(default_factory=dict[int, int])
    """Those of them that save a checkpoint outside of the phase that is measured, by rank."""
    chained: frozenset[str] = frozenset()
    """Lines of collectives that need each other's results; see `chained_collectives`."""
    gil_waits: Mapping[tuple[int, str, str], int] = field(default_factory=dict[tuple[int, str, str], int])
    """Those of them that wait for the GIL, by rank, the function of the thread that holds it, and a line of it; with an
    empty line, all of the function. See `gil_waits.GilWaits`."""
    thread_waits: Mapping[int, int] = field(default_factory=dict[int, int])
    """Those of them that wait for another thread or process by themselves, as in `queue.get`, by rank."""
    backward: Mapping[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    """Stack samples in the phase backward, by rank and the program's line."""
    around_model: Mapping[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    """Those between the batch and backward, and between two steps, by rank and the program's line."""
    losses: Mapping[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    """Stack samples of a cross-entropy, by rank and the program's line that gives its scores."""
    fetches: Mapping[int, int] = field(default_factory=dict[int, int])
    """Stack samples of dataloader workers inside fetches so far, by rank."""
    locked: Mapping[int, int] = field(default_factory=dict[int, int])
    """Those of them in a lock that several processes share, by rank."""
    fetching: Mapping[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    """Those of them in a line of the program's dataset or collate function, by rank and line."""
    calls: Mapping[tuple[int, str], str] = field(default_factory=dict[tuple[int, str], str])
    """What each line of `calling`, `fetching` and `gil_waits` mostly calls; empty: not known."""
    cpu_nodes: Mapping[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])
    """NUMA nodes of the cores that a rank may run on, by rank; only known ones."""


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """The minimum of sampled memory in one window: what remains after a step has freed its own."""

    at_s: float
    steps: int
    trainer_bytes: int | None
    """Anonymous memory of the rank's own process, and the batches in shared memory that it has not freed."""
    trainer_virtual_bytes: int | None = None
    """Its address space in use."""
    workers_bytes: int | None
    """Anonymous memory of its workers; shared pages count proportionally."""
    workers_allocated_bytes: int | None = None
    """All anonymous memory of its workers; pages shared with the rank count in each of them."""
    workers_alive: int
    gpu_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class RankWindow:
    """One rank in a window."""

    rank: int
    steps: int
    microsteps: int = 0
    """Backward passes: more than the steps if gradients are accumulated."""
    step_ns: int
    phase_ns: Mapping[str, int]
    loader: LoaderState | None
    """Counts and times are the window's; the queue is as it was at its end. None where the queue is not known."""
    workers: LoaderWorkers | None
    """None where they do not measure themselves, or there are none."""
    workers_alive: int
    worker_cores: frozenset[int] = frozenset()
    """The cores that at least one of them may run on; empty: not known."""
    stall: Stall
    copies: Mapping[tuple[str, str], CopyTotals]
    sites: tuple[Site, ...]
    validation_share: float = 0.0
    """Of all step time of the attempt so far."""
    saves: int
    """Checkpoints that gpulaunch.checkpoint has committed."""
    compiled: bool = False
    """torch.compile has compiled something so far."""
    pauses: Pauses
    """The window's, except `ddp_comm_ns` and `ddp_overlap_ns`."""
    gpu: GpuMemory | None
    """As at its end; `alloc_retries` and `ooms` are the window's."""
    gpu_time: GpuTime | None = None
    """The window's; None where the GPU's clock was not read."""
    trainer_cpu_s: float
    workers_cpu_s: float
    workers_system_s: float = 0.0
    """The part of that in the kernel."""
    trainer_runqueue_s: float | None
    """None where the kernel does not count it."""
    main_thread_s: float | None = None
    """How long the first thread of the rank's process ran, or was ready to; None where it is not known."""
    shm_inflight_bytes: Mapping[int, int] | None
    """Of batches in flight at its end, by the pid of the worker that made them; None where it may not be read."""
    facts: Mapping[str, Any]
    samples: int
    """Number of stack samples of the training thread."""
    logged: Mapping[str, int]
    """Those inside logging, by the program's line."""
    calling: Mapping[str, int]
    """Those in other calls outside of the model's compute, by the program's line."""
    after_step: Mapping[str, str] = field(default_factory=dict[str, str])
    """What these lines are a part of that runs after a step: the line of the loop that calls it, or the method of a
    callback."""
    indexing: int = 0
    """Those of them in a sampler that a dataloader asks for indices."""
    saving_share: float = 0.0
    """Those that save a checkpoint outside of the phase `checkpoint`, of all since the start of the run; 0 if few."""
    chained: frozenset[str] = frozenset()
    """Lines of collectives that need each other's results."""
    before_backward: int = 0
    """Number of stack samples before backward, since the start of the run: what they show of a loop is known late, and
    then of all of them."""
    looping: Mapping[str, int] = field(default_factory=dict[str, int])
    """Those of these in a loop inside a step that one operation could replace, by the loop's first line; since the
    start of the run."""
    loop_ends: Mapping[str, int] = field(default_factory=dict[str, int])
    """The numbers of the last lines of these loops."""
    gil_waits: Mapping[str, int] = field(default_factory=dict[str, int])
    """Those that wait for the GIL, by the function of the thread that holds it."""
    gil_lines: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """The same since the start of the run, by the function and a line of the program on that thread's stack, callers
    first; with an empty line, all of the function. They only name a line."""
    thread_waits: int = 0
    """Those that wait for another thread or process by themselves."""
    backward: Mapping[str, int] = field(default_factory=dict[str, int])
    """Samples in the phase backward, by the program's line, since the start of the run: they only name a line."""
    around_model: Mapping[str, int] = field(default_factory=dict[str, int])
    """Those of the window between the batch and backward, and between two steps."""
    scores_line: str = ""
    """The program's line that gives the scores of most cross-entropies; empty: none was sampled, or a library's."""
    scores_share: float = 0.0
    """Of all samples since the start, those of this line and of its loss; 0: the line calls other lines for them."""
    fetches: int
    """Number of stack samples of its workers inside fetches, since the start of the run: they only name a line, which
    should not change from window to window."""
    locked: int = 0
    """Those in a lock that several processes share."""
    fetching: Mapping[str, int]
    """Those in a line of the program."""
    calls: Mapping[str, str]
    """What each line of `calling`, `fetching` and `gil_lines` calls; empty: not known."""
    memory: tuple[MemoryPoint, ...]
    """The trend of the whole attempt, its oldest point first."""
    cpu_nodes: frozenset[int]

    @property
    def step_s(self) -> float:
        """The mean step; 0 where there was none."""
        return self.step_ns / 1e9 / self.steps if self.steps else 0.0

    def per_step_s(self, ns: float) -> float:
        """Convert nanoseconds of the window to seconds per step."""
        return ns / 1e9 / self.steps if self.steps else 0.0

    @property
    def backward_line(self) -> str:
        """The program's line that most backward passes are called from; empty: none was sampled."""
        return max(self.backward, key=self.backward.__getitem__, default="")

    def with_backward_s(self, forward_s: float) -> float:
        """Seconds per step of what takes so long in forward, with as large a part of backward."""
        return forward_s + self.phase_s("backward") * forward_s / max(self.phase_s("forward"), forward_s)

    def phase_s(self, phase: str) -> float:
        """Seconds per step of a phase."""
        return self.per_step_s(self.phase_ns.get(phase, 0))


@dataclass(frozen=True, kw_only=True)
class GpuWindow:
    """One GPU in a window."""

    state: GpuState
    """As at its end; ratios are means over the snapshots of the window."""
    throttle_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Window:
    """One node between two snapshots."""

    seconds: float
    ranks: tuple[RankWindow, ...]
    """Ranks with enough steps in it for a verdict."""
    gpus: tuple[GpuWindow, ...]
    host: HostState | None
    """As at its end."""
    pressure_s: Mapping[tuple[str, str], float]
    cores: float | None
    """Cores that the ranks may use: their affinity, or the quota of their control group."""
    longer: Window | None = None
    """The same over a longer time, up to the same end; None if there is no longer one."""

    @property
    def over(self) -> Window:
        """The longest available window."""
        return self.longer or self

    def gpu_of(self, rank: RankWindow) -> GpuWindow | None:
        """The GPU or MIG instance that a rank computes on, found by its UUID."""
        device = rank.facts.get("device")
        uuid = device.get("uuid") if isinstance(device, dict) else None
        return self._gpu(uuid) if isinstance(uuid, str) and uuid else None

    def card_of(self, rank: RankWindow) -> GpuWindow | None:
        """The same as a whole card: values measured per card only apply to each of its instances."""
        gpu = self.gpu_of(rank)
        return gpu if gpu is None or gpu.state.parent_uuid is None else self._gpu(gpu.state.parent_uuid)

    def _gpu(self, uuid: str) -> GpuWindow | None:
        bare = bare_uuid(uuid)
        return next((gpu for gpu in self.gpus if bare_uuid(gpu.state.uuid) == bare), None)

    def pressure(self, resource: str) -> float | None:
        """The share of the time in which at least one task of the node waited for a resource."""
        waited_s = self.pressure_s.get((resource, "some"))
        return None if waited_s is None or self.seconds <= 0 else waited_s / self.seconds
