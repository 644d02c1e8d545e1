"""Data types of the ranks of this node, and of their processes, workers and collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """One rank of the running attempt, as the agent started it."""

    rank: int
    local_rank: int
    pid: int


@dataclass(frozen=True, kw_only=True)
class AttemptGroup:
    """The running attempt, as the agent described it in group.json."""

    run_id: str
    name: str
    attempt: int
    world_size: int
    node_rank: int
    ranks: tuple[RankPlace, ...]
    directory: int | None = None
    """The number of this node's run directory; None: `node_rank`, which may change in an elastic job."""

    @property
    def node(self) -> int:
        """The number of this node in its run, the same in all attempts."""
        return self.node_rank if self.directory is None else self.directory


class Role(Enum):
    """Which processes of a rank: the training process itself, or all processes below it."""

    TRAINER = "trainer"
    WORKERS = "workers"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory held now and CPU time used so far, summed over the processes of one role of one rank."""

    rss_bytes: int
    pss_bytes: int | None
    """None until it was read for every process of the role (it is expensive, so it is read rarely)."""
    cpu_user_s: float
    cpu_system_s: float
    """CPU seconds include processes that have ended."""
    anonymous_bytes: int | None = None
    """The private, non-file part of the resident memory. The rest are pages of mapped files, which the kernel reclaims
    when it needs them, and shared memory. None where it is not known."""
    virtual_bytes: int | None = None
    """The address space in use. It grows when memory is allocated, the resident memory when it is first written."""
    pss_anonymous_bytes: int | None = None
    """The same for the proportional size; None also where the kernel does not report it separately (older ones)."""


@dataclass(frozen=True, kw_only=True)
class RankProcesses:
    """The processes of one rank."""

    rank: int
    usage: Mapping[Role, Usage]
    workers_alive: int
    """Live dataloader workers (they name themselves `pt_data_worker`); other children count in the usage only."""
    worker_cores: frozenset[int] = frozenset()
    """The cores that at least one of these workers may run on; empty: there are none, or it is not known."""
    runqueue_s: Mapping[Role, float] = field(default_factory=dict[Role, float])
    """Seconds that threads of the role were ready to run but had no core, including processes that ended. Summed over
    all threads, so more than a second per second is possible. Empty where the kernel does not count it."""
    main_thread_s: float | None = None
    """Seconds that the first thread of the rank's process ran, or was ready to, since it was started; None where the
    kernel does not count it."""
    threads: float | None = None
    """How many threads of the rank, workers included, ran or waited for a core, on average between the last two
    samples of each; None before the second. If the sum over all ranks exceeds the node's cores: oversubscribed."""
    shm_inflight_bytes: Mapping[int, int] | None = field(default_factory=dict[int, int])
    """Shared memory that holds batches not yet freed by the rank, by the pid of the worker that made them (it may have
    ended). As of the last sample, at most some ten seconds ago while there is time for it; None where the descriptors
    of its processes may not be read, or were not read yet."""


@dataclass(frozen=True, kw_only=True)
class LoaderWorkers:
    """All dataloader workers of one rank so far, over all attempts of the run. All times are within fetches."""

    rank: int
    batches: int
    samples: int
    wall_ns: int
    """The next three sum to it."""
    cpu_ns: int
    """On a core: preparing."""
    runqueue_ns: int
    """Ready to run, but no core was free."""
    blocked_ns: int
    """Waiting for anything else: storage, a network, a lock."""
    collate_ns: int
    """Of the wall time: making a batch of samples."""
    storage_bytes: int
    """Read from a device or a network file system."""
    cached_bytes: int
    """Read from memory: the page cache, pipes."""
    alive: int
    """Live workers that have fetched."""
    knows_runqueue: bool
    """False: the kernel does not count it, and `blocked_ns` includes it."""


@dataclass(frozen=True, kw_only=True)
class RankCollectives:
    """The collectives of one rank. Counts cover all attempts of the run; the last three fields the current one."""

    rank: int
    calls: Mapping[str, int]
    """Calls started by the training thread, by `channel.collectives.KINDS`; only kinds that occurred. Collectives that
    DistributedDataParallel starts, in C++, are in the next two only."""
    enqueued: int | None
    """Collectives started in all process groups, as torch's flight recorder numbers them; None: it reports nothing. It
    is read once a second, at the end of a step."""
    completed: int | None
    sequence: int | None
    """Number of the last one started in the default process group: the others wait for a rank that is behind."""
    last: str | None
    """The kind of the last call."""
    running: bool
    """Whether the training thread is inside it."""
