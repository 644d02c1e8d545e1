"""The interface between the agent and a rendezvous, which brings the nodes of a job together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gpulaunch.launcher.failure.causes import Cause
from gpulaunch.launcher.policy.restart import Decision

if TYPE_CHECKING:
    from gpulaunch.launcher.rendezvous.plan import Offer, Plan


class RendezvousError(Exception):
    """The nodes cannot meet; `str()` is one line for the user: what happened, and what to do."""


class PortInUseError(RendezvousError):
    """Another process listens on the port where the nodes are to meet."""


@dataclass(frozen=True, kw_only=True)
class World:
    """One attempt as seen from this node."""

    attempt: int
    nnodes: int
    node_rank: int
    first_rank: int
    """Global rank of this node's local rank 0."""
    world_size: int
    master_addr: str
    master_port: int
    local_addr: str = ""
    """The address of this node at which the others reach it; "" if unknown."""
    store_fd: int | None
    """On the node that hosts it, the listening socket for this attempt's TCPStore: pass it on, but do not close it; the
    rendezvous does, at the next `join` or at `close`."""
    job: str = ""
    """Identity of the job on all its nodes; "" for a job of one node."""
    generation: int = 0
    """Grows with each group of the job, also of a leader that has started anew; 0 where `job` is ""."""
    resume: str = ""
    """The key of the checkpoint, among those that every node offered, that all resume from; "" for none."""


class Rendezvous(Protocol):
    """The agent's interface to a rendezvous. Set the callbacks before the first `join`; they run on the loop."""

    on_joined: Callable[[World], None]
    """All nodes are ready for the attempt that was joined: start its ranks."""
    on_failed: Callable[[str], None]
    """The join could not be completed, and a retry is pointless: one line with the reason and what to do."""
    on_peer_failed: Callable[[bool, str], None]
    """Another node's part of this attempt failed: whether the job is given up, and the reason, as one line."""
    on_fenced: Callable[[str], None]
    """The others may go on without this node in a moment: its ranks must be dead before; the reason, as one line."""
    on_node_lost: Callable[[str], None]
    """Another node is gone, which ends the job; the reason, as one line."""
    on_peer_preempted: Callable[[str], None]
    """Another node was asked to save and end, and this one must do the same; the reason, as one line."""
    on_saves: Callable[[str], None]
    """The ranks of all nodes save before they end, and others follow: a node leaves, or another one takes part; as one
    line."""
    on_peers_done: Callable[[], None]
    """The ranks of every node have ended successfully, and every node knows it."""
    on_over: Callable[[Decision, str], None]
    """The job has ended, or is out of reach, while this node takes no part; why, as one line."""
    on_judged: Callable[[Decision, str], None]
    """Whether there is another attempt after the one that `judge` was called for, and what ended it on another node, as
    one line; "" where it was this one."""

    def open(self) -> None:
        """Let the nodes find each other while this one still prepares to join. Idempotent."""
        ...

    def join(self, attempt: int, offers: Sequence[Offer] = ()) -> None:
        """Declare that no rank of an earlier attempt is alive here, and wait for all other nodes to do so.

        `offers`: the complete checkpoints that this node can read, the best first.
        Answers by `on_joined` or `on_failed`, never from within this call.
        """
        ...

    def idle(self, idle: bool) -> None:
        """Report whether the ranks of this node are known not to work, any of them: they rest, or wait for others."""
        ...

    def others_idle_s(self) -> float | None:
        """How long no rank of another node has worked; infinite if there is none; None: one works, or it is unknown."""
        ...

    def succeeded(self) -> None:
        """Report that all ranks of this node have ended successfully."""
        ...

    def failed(self, cause: Cause) -> None:
        """Report that the ranks of this node are being ended, as soon as that is known: those of the others wait."""
        ...

    def judge(self, cause: Cause) -> None:
        """No rank of this node is alive after a failure here or elsewhere: ask whether there is another attempt.

        Answers by `on_judged`, maybe from within this call.
        """
        ...

    def leave(self) -> bool:
        """This node has ended for good; whether it may be closed: no other node needs it any more. Ask again."""
        ...

    def close(self) -> None:
        """Leave: no callback is called any more. Idempotent."""
        ...


def unset(*args: object) -> None:
    """A callback that is not set yet."""
    raise AssertionError(f"rendezvous callback called before it was set: {args}")


class Callbacks:
    """The callbacks of a `Rendezvous`, before they are set."""

    def __init__(self) -> None:
        self.on_joined: Callable[[World], None] = unset
        self.on_failed: Callable[[str], None] = unset
        self.on_peer_failed: Callable[[bool, str], None] = unset
        self.on_fenced: Callable[[str], None] = unset
        self.on_node_lost: Callable[[str], None] = unset
        self.on_peer_preempted: Callable[[str], None] = unset
        self.on_saves: Callable[[str], None] = unset
        self.on_peers_done: Callable[[], None] = unset
        self.on_over: Callable[[Decision, str], None] = unset
        self.on_judged: Callable[[Decision, str], None] = unset


class KeeperCallbacks:
    """What a node's side of the place where the plan is kept calls, before it is set."""

    def __init__(self) -> None:
        self.on_plan: Callable[[Plan], None] = unset
        """The newest plan, with this node's seat only."""
        self.on_failed: Callable[[str], None] = unset
        """The plan is out of reach, or this node is refused: one line with the reason and what to do."""
        self.on_note: Callable[[str], None] = unset
        """A line for the user."""
        self.on_silence: Callable[[], None] = unset
        """No beat of this node has been acknowledged for `member.FENCE_S`."""
