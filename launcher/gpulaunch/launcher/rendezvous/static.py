"""The rendezvous of a fixed number of nodes with fixed ranks: `--nnodes --node-rank --master-addr --master-port`.

Node 0's agent listens at the master address; the other agents connect and stay connected for the whole job. When all
are there, the listening socket goes to the store of each attempt, so the ranks meet at the same address and port as
under torchrun, and the port is never free for another process. Decisions are in `rounds`, messages in `messages`.

A lost node ends the job: a static rendezvous has no second chance to connect.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.launcher.rendezvous import rounds
from gpulaunch.launcher.rendezvous.base import World, unset
from gpulaunch.launcher.rendezvous.connection import Pace
from gpulaunch.launcher.rendezvous.follower import Follower
from gpulaunch.launcher.rendezvous.leader import Leader
from gpulaunch.launcher.rendezvous.messages import Failed, Go, Hello, Message, clean


class StaticRendezvous:
    """One node's part in the rendezvous. Node 0 binds the port here; raises RendezvousError if it cannot."""

    def __init__(
        self,
        loop: Loop,
        *,
        run_id: str,
        nnodes: int,
        node_rank: int,
        nproc: int,
        master_addr: str,
        master_port: int,
        max_restarts: int = 0,
        timeout_s: float = 900.0,
        pace: Pace | None = None,
        host: str | None = None,
    ) -> None:
        """`timeout_s` bounds the wait for the other nodes; `pace` is for tests."""
        self.on_joined: Callable[[World], None] = unset
        self.on_failed: Callable[[str], None] = unset
        self.on_peer_failed: Callable[[bool, str], None] = unset
        self.on_node_lost: Callable[[str], None] = unset
        self.on_peer_preempted: Callable[[str], None] = unset
        self.on_peers_done: Callable[[], None] = unset
        self.on_note: Callable[[str], None] = _nothing
        """A line for the user while nodes are gathered: which are missing, which were refused."""
        self._nnodes = nnodes
        self._node_rank = node_rank
        self._addr = master_addr
        self._member = rounds.Member()
        self._closed = False
        hello = Hello(
            run_id=clean(run_id),
            nnodes=nnodes,
            node_rank=node_rank,
            nproc=nproc,
            host=clean(host or os.uname().nodename),
            max_restarts=max_restarts,
        )
        kind = Leader if node_rank == rounds.LEADER else Follower
        self._post: Leader | Follower = kind(
            loop, hello, addr=master_addr, port=master_port, timeout_s=timeout_s, pace=pace or Pace()
        )
        self._post.on_message = self._heard
        self._post.on_failed = lambda why: self.on_failed(why)
        self._post.on_note = lambda text: self.on_note(text)

    @property
    def master_port(self) -> int:
        """The port where the nodes meet; chosen by the kernel if node 0 was given 0."""
        return self._post.port

    def open(self) -> None:
        """Start gathering early: a search for checkpoints may take longer than the others wait for a message."""
        if self._member.phase is rounds.MemberPhase.IDLE:
            self._member = rounds.Member(phase=rounds.MemberPhase.JOINING)
            self._post.open()

    def join(self, attempt: int, offers: Sequence[str] = ()) -> None:
        """Wait for the other nodes; see `Rendezvous`."""
        self.open()
        self._member, ready = rounds.join(self._member, attempt, offers)
        if ready is not None:
            self._post.send(ready)

    def tell(self, *, ok: bool, final: bool, why: str = "", preempted: bool = False) -> None:
        """Report the result here. May be called again when it got worse: that there will be no restart after all."""
        self._member, ended = rounds.tell(self._member, ok=ok, final=final, why=why or "failed", preempted=preempted)
        if ended is not None:
            self._post.send(ended)

    def close(self) -> None:
        """Leave. A node that leaves before the end of the job counts as lost for the others."""
        if not self._closed:
            self._closed = True
            self._post.close()

    def _heard(self, message: Message) -> None:
        self._member, news = rounds.receive(self._member, message)
        if not news:
            return
        if isinstance(message, Go):
            self.on_joined(
                World(
                    attempt=message.attempt,
                    nnodes=self._nnodes,
                    node_rank=self._node_rank,
                    first_rank=message.first_rank,
                    world_size=message.world_size,
                    master_addr=self._addr,
                    master_port=self._post.port,
                    store_fd=self._post.store_fd,
                    resume=message.resume,
                )
            )
        elif isinstance(message, Failed) and message.preempted:
            self.on_peer_preempted(message.why)
        elif isinstance(message, Failed) and message.lost:
            self.on_node_lost(message.why)
        elif isinstance(message, Failed):
            self.on_peer_failed(message.final, message.why)
        else:
            self.on_peers_done()


def _nothing(text: str) -> None:
    """The notes are not shown."""
