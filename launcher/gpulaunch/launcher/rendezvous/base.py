"""The interface between the agent and a rendezvous, which brings the nodes of a job together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


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
    store_fd: int | None
    """On the node that hosts it, the listening socket for this attempt's TCPStore: pass it on, but do not close it; the
    rendezvous does, at the next `join` or at `close`."""
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
    on_node_lost: Callable[[str], None]
    """Another node is gone, which ends the job; the reason, as one line."""
    on_peer_preempted: Callable[[str], None]
    """Another node was asked to save and end, and this one must do the same; the reason, as one line."""
    on_peers_done: Callable[[], None]
    """The ranks of every node have ended successfully, and every node knows it."""

    def open(self) -> None:
        """Let the nodes find each other while this one still prepares to join. Idempotent."""
        ...

    def join(self, attempt: int, offers: Sequence[str] = ()) -> None:
        """Declare that no rank of an earlier attempt is alive here, and wait for all other nodes to do so.

        `offers`: names of the complete checkpoints that this node can read, the best first. The same name on two nodes
        means the same checkpoint.
        Answers by `on_joined` or `on_failed`, never from within this call.
        """
        ...

    def tell(self, *, ok: bool, final: bool, why: str = "", preempted: bool = False) -> None:
        """Report how this node's part of the attempt ended; `final`: a failure that no node should retry.

        `preempted`: it has not failed, it was asked to save and end, and the others must do so with it.
        """
        ...

    def close(self) -> None:
        """Leave: no callback is called any more. Idempotent."""
        ...


def unset(*args: object) -> None:
    """A callback that is not set yet."""
    raise AssertionError(f"rendezvous callback called before it was set: {args}")
