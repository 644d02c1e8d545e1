"""The ranks of this node: who they are, and what their processes, workers and collectives do."""

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


class Role(Enum):
    """Whose share of a rank's memory and CPU: the training process itself, or every process below it."""

    TRAINER = "trainer"
    WORKERS = "workers"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory held now and CPU time used so far, summed over the processes of one role of one rank."""

    rss_bytes: int
    pss_bytes: int | None
    """None until every process of the role has been asked (it is dear, so it is asked rarely)."""
    cpu_user_s: float
    cpu_system_s: float
    """CPU seconds include processes that have ended."""
    anonymous_bytes: int | None = None
    """Of the resident memory, what is no file's and nobody's but theirs: the rest are pages that files are mapped to,
    which the kernel takes back when it needs them, and shared memory. None where it is not known."""
    pss_anonymous_bytes: int | None = None
    """The same of the proportional size; None also where the kernel does not tell it apart (older ones)."""


@dataclass(frozen=True, kw_only=True)
class RankProcesses:
    """The processes of one rank."""

    rank: int
    usage: Mapping[Role, Usage]
    workers_alive: int
    """Living dataloader workers (they name themselves `pt_data_worker`); other children are in the usage only."""
    runqueue_s: Mapping[Role, float] = field(default_factory=dict[Role, float])
    """Seconds that threads of the role were ready to run and had no core, those of processes that ended included: of
    all threads, so more than a second a second is possible. Empty where the kernel does not count it."""
    threads: float | None = None
    """How many threads of the rank, workers included, ran or waited for a core, on average between the last two
    looks at each; None before the second look. Over all ranks more than the cores of the node: oversubscribed."""
    shm_inflight_bytes: Mapping[int, int] | None = field(default_factory=dict[int, int])
    """Shared memory that holds batches, by the pid of the worker that made them (it may have ended): made and not yet
    freed by the rank. As of the last look, some ten seconds ago at most while there is time for it; None where what its
    processes have open may not be read, or was not yet."""


@dataclass(frozen=True, kw_only=True)
class LoaderWorkers:
    """All dataloader workers of one rank so far, over all attempts of the run. All times are of fetches."""

    rank: int
    batches: int
    samples: int
    wall_ns: int
    """The next three sum to it."""
    cpu_ns: int
    """On a core: preparing."""
    runqueue_ns: int
    """Ready to run, and no core was free."""
    blocked_ns: int
    """Waiting for anything else: storage, a network, a lock."""
    collate_ns: int
    """Of the wall time: making a batch of samples."""
    storage_bytes: int
    """Read from a device or a network file system."""
    cached_bytes: int
    """Read from memory: the page cache, pipes."""
    alive: int
    """Workers that live now and have fetched."""
    knows_runqueue: bool
    """False: the kernel does not count it, and `blocked_ns` holds it too."""


@dataclass(frozen=True, kw_only=True)
class RankCollectives:
    """The collectives of one rank. Counts cover all attempts of the run, the last three are of the running one."""

    rank: int
    calls: Mapping[str, int]
    """Calls that the training thread has begun, by `channel.collectives.KINDS`; only what there was. What
    DistributedDataParallel begins, in C++, is in the next two only."""
    enqueued: int | None
    """Collectives of all process groups that were begun, as torch's flight recorder numbers them; None: it says
    nothing. It is asked once a second, at the end of a step."""
    completed: int | None
    sequence: int | None
    """Number of the last one that was begun in the default process group: who is behind the others is waited for."""
    last: str | None
    """The kind of the last call."""
    running: bool
    """Whether the training thread is inside of it."""
