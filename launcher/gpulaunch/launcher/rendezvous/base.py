"""The interface between the agent and a rendezvous: what brings the nodes of a job together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class RendezvousError(Exception):
    """The nodes cannot meet; `str()` is one line for the user: what happened, and what to do."""


class PortInUseError(RendezvousError):
    """Another process listens where the nodes are to meet."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What one attempt looks like from this node."""

    attempt: int
    nnodes: int
    node_rank: int
    first_rank: int
    """Global rank of this node's local rank 0."""
    world_size: int
    master_addr: str
    master_port: int
    store_fd: int | None
    """On the node that hosts it, the listening socket for this attempt's TCPStore: pass it on, do not close it; the
    rendezvous does, at the next `join` or at `close`."""
    resume: str = ""
    """Of the checkpoints that every node offered, the one that all go on from, by its key; "" for none."""


class Rendezvous(Protocol):
    """What the agent asks of a rendezvous. Set the callbacks before the first `join`; they run on the loop."""

    on_joined: Callable[[World], None]
    """All nodes are ready for the attempt that was joined: start its ranks."""
    on_failed: Callable[[str], None]
    """The join could not be completed, and trying again would not help: one line why and what to do."""
    on_peer_failed: Callable[[bool, str], None]
    """Another node's part of this attempt failed: whether the job is given up, and why, as one line."""
    on_node_lost: Callable[[str], None]
    """Another node is gone, and the job with it; why, as one line."""
    on_peer_preempted: Callable[[str], None]
    """Another node was told to save and end, and this one is to do the same; why, as one line."""
    on_peers_done: Callable[[], None]
    """The ranks of every node have ended well, and every node knows."""

    def open(self) -> None:
        """Let the nodes find each other, while this one still prepares to join. Idempotent."""
        ...

    def join(self, attempt: int, offers: Sequence[str] = ()) -> None:
        """Say that no rank of an earlier attempt is alive here, and wait for all others to say so.

        `offers`: what names the complete checkpoints that this node can read, the best first. Two nodes that name one
        alike have the same.
        Answers by `on_joined` or `on_failed`, never from within this call.
        """
        ...

    def tell(self, *, ok: bool, final: bool, why: str = "", preempted: bool = False) -> None:
        """Say how this node's part of the attempt ended; `final`: a failure after which nobody should try again.

        `preempted`: it has not failed, it was told to save and end, and the others are to do so with it.
        """
        ...

    def close(self) -> None:
        """Leave: no callback comes any more. Idempotent."""
        ...


def unset(*args: object) -> None:
    """A callback that nobody has set yet."""
    raise AssertionError(f"rendezvous callback called before it was set: {args}")
