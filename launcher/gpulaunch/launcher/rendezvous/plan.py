"""What the nodes of a job say of themselves (`Report`) and what they are to do together (`Plan`). Values only.

One place keeps the plan, the leader's memory for one; `decide` makes the next plan of the present one and of the newest
report of every node, `member` is a node's part. Both are level-triggered: what counts is what holds now, not which
message came first, so that a message that is lost, repeated or late changes nothing.

    FORMING   waits for nodes that are ready
    RUNNING   the seated nodes run the ranks of `generation`
    STOPPING  that generation is over; its ranks are being ended, on every node
    OVER      there will be no other generation

A generation is formed only when no rank of an earlier one is alive: each of its nodes has said so, or has been silent
for so long that it has ended its ranks by itself (`Settings.silent_s`, `fence_s` of the member).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from gpulaunch.launcher.failure.causes import Cause
from gpulaunch.launcher.policy.restart import Decision, Limits, RestartHistory


class Stage(Enum):
    """The state of the job; see the module's docstring."""

    FORMING = "forming"
    RUNNING = "running"
    STOPPING = "stopping"
    OVER = "over"


class NodeState(Enum):
    """What a node does in the generation that its report names."""

    PREPARING = "preparing"
    """It has no rank, and cannot have one yet: it looks for checkpoints, say."""
    READY = "ready"
    """It has no rank, and can start the next generation."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    """All its ranks have ended successfully."""
    ENDING = "ending"
    """Its ranks are being ended: they failed, or it was told to."""
    ENDED = "ended"
    """None of its ranks is alive; it waits for what comes next."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A node's part in a generation."""

    node: str
    host: str
    node_rank: int
    nproc: int
    first_rank: int
    """Global rank of its local rank 0."""


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """The leader's own node: a leader that has started anew asks there whether the one before is dead."""

    seat: Seat
    address: str
    agent_port: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the nodes do together."""

    job: str = ""
    """Identity of the job, the same for all its generations on all nodes, and of no other job."""
    stage: Stage = Stage.FORMING
    generation: int = 0
    """0: none has been formed yet."""
    since_s: float = 0.0
    """When the stage began, by the clock of who keeps the plan."""
    not_before_s: float = 0.0
    """No generation is formed before, by the same clock."""
    seats: tuple[Seat, ...] = ()
    """Of the generation, or of the last one, by node rank; what a node is sent has its own only."""
    keeper: Keeper | None = None
    """Of a plan in the memory of a leader that has a seat."""
    nnodes: int = 0
    world_size: int = 0
    store_addr: str = ""
    store_port: int = 0
    resume: str = ""
    """The key of the offer that all resume from; "" for none."""
    attempt: int = 0
    """Restarts so far; nodes that join or leave count, too."""
    history: RestartHistory = field(default_factory=RestartHistory)
    judged: int = 0
    """The last generation that is over and has been judged."""
    decision: Decision | None = None
    """Of the restart policy, about that generation."""
    why: str = ""
    """What ended that generation, or is ending the present one: one line with the name of the node."""
    blamed: str = ""
    """The identity of that node."""
    succeeded: bool = False
    """OVER: all ranks of all nodes have ended successfully."""
    exit_code: int = 0
    """OVER: of every node, unless a rank of its own is to blame."""
    idle: bool = False
    """RUNNING: no node knows of a rank of its own that works, and each has looked."""
    saves: bool = False
    """STOPPING: the ranks of all nodes are to save before they end."""
    preempted: bool = False
    """STOPPING, OVER: the job was asked to end."""
    lost: bool = False
    """STOPPING, OVER: a node was lost."""

    @property
    def seat(self) -> Seat | None:
        """The seat of the node that this was sent to."""
        return self.seats[0] if self.seats else None

    def for_node(self, node: str) -> Plan:
        """As `for_seat`, for a node's identity; looks at every seat."""
        return self.for_seat(next((seat for seat in self.seats if seat.node == node), None))

    def for_seat(self, seat: Seat | None) -> Plan:
        """What one node needs of it: its size does not depend on the number of nodes. None: it has no seat."""
        return replace(self, seats=() if seat is None else (seat,))


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A complete checkpoint that a node can read."""

    key: str
    """The same on two nodes only if the checkpoint is the same."""
    generation: int = 0
    step: int = 0
    """Of a newer generation, or of the same and a later step, it is the newer one; both 0 if that is unknown."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a node says of itself: all that is known of it, each time."""

    node: str
    """Identity of the agent process: random, another after a restart."""
    host: str
    address: str = ""
    """The address from which it reaches the leader; others reach its store there."""
    order: int | None = None
    """Its number among the nodes, where it was given one (--node-rank, SLURM_PROCID, a completion index)."""
    nproc: int
    state: NodeState = NodeState.PREPARING
    generation: int = 0
    """The last one in which it had a part."""
    newest: int = 0
    """The newest generation that it knows of."""
    job: str = ""
    """That generation's `Plan.job`."""
    store_port: int = 0
    """Where the ranks meet if it is node rank 0 of the next generation: it listens there already."""
    agent_port: int = 0
    """Where its agent listens for as long as it lives: refused there, it is dead. Only node 0 of a fixed group answers
    there, those that dial anew."""
    offers: tuple[Offer, ...] = ()
    """READY: the checkpoints that it can read, the best first."""
    idle: bool = False
    """RUNNING: none of its ranks works; they rest, or wait for others."""
    cause: Cause | None = None
    """ENDING and ENDED: why, unless it was told to end."""
    plan: Plan | None = None
    """What it was sent of that generation's: a leader that has started anew makes the plan of these."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What does not change during a job."""

    min_nodes: int
    max_nodes: int
    limits: Limits
    join_timeout_s: float = 600.0
    """How long to wait for `min_nodes`; torchrun's --rdzv-conf join_timeout."""
    last_call_s: float = 30.0
    """How much longer to wait for `max_nodes`; torchrun's last_call_timeout."""
    away_s: float = 60.0
    """How long nodes wait for a leader that they have lost."""
    silent_s: float = 9.0
    """A node that has not been heard for so long is lost. Its ranks are dead by then: it ends them by itself after
    7.5 s without an answer (`member.FENCE_S`)."""

    replicate: bool = False
    """One node that can read a checkpoint is enough: its ranks send it to the others."""
    fixed: bool = False
    """The nodes are `max_nodes` with numbers from 0, for the whole job: one that is lost ends it."""

    @classmethod
    def of_fixed(cls, nnodes: int, limits: Limits, *, join_timeout_s: float, replicate: bool = False) -> Settings:
        """Of a group of `nnodes` that stay the same."""
        settings = cls(
            min_nodes=nnodes,
            max_nodes=nnodes,
            limits=limits,
            join_timeout_s=join_timeout_s,
            replicate=replicate,
            fixed=True,
        )
        return replace(settings, away_s=settings.silent_s)  # node 0 does not come back to its job

    @property
    def leader(self) -> str:
        """Who keeps the plan, for users."""
        return "node 0" if self.fixed else "the leader"

    @property
    def elastic(self) -> bool:
        """Whether the job may run with fewer nodes than it would like."""
        return self.min_nodes < self.max_nodes


@dataclass(frozen=True, kw_only=True)
class Member:
    """A node as the leader knows it; times are the leader's monotonic clock."""

    report: Report
    heard_s: float
    """When it was last heard."""
    state_s: float
    """Since when its state is what it is."""
    failed_s: float = math.inf
    """When what its cause tells of happened."""
    gone: bool = False
    """Its agent has said goodbye, or its host answers and says that the agent does not run any more."""
