"""The rendezvous of a job on one node: no other nodes, only a store that the ranks must be able to find."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence

from gpulaunch.launcher.failure.causes import Cause
from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.launcher.policy.restart import Limits, RestartPolicy, failure_of
from gpulaunch.launcher.rendezvous.base import Callbacks, RendezvousError, World
from gpulaunch.launcher.rendezvous.listen import listen
from gpulaunch.launcher.rendezvous.plan import Offer


class LocalRendezvous(Callbacks):
    """Gives every attempt a listening socket for its store, bound before anything starts.

    If a port is given, that socket is bound in the constructor (raises RendezvousError) and held over all attempts, so
    that no other process takes the port in between. Otherwise every attempt gets a fresh port.
    """

    def __init__(self, loop: Loop, *, nproc: int, master_addr: str, master_port: int | None, limits: Limits) -> None:
        super().__init__()
        self._loop = loop
        self._policy = RestartPolicy(limits)
        self._nproc = nproc
        self._addr = master_addr
        self._port = master_port or 0
        self._socket: socket.socket | None = listen(self._addr, self._port)
        self._served = False  # an attempt has had the socket
        self._closed = False

    def open(self) -> None:
        """Do nothing: there is no other node."""

    def join(self, attempt: int, offers: Sequence[Offer] = ()) -> None:
        """Answer in the loop's next turn."""
        self._soon(lambda: self._join(attempt, offers[0].key if offers else ""))

    def _join(self, attempt: int, resume: str) -> None:
        if self._socket is None or (self._served and self._port == 0):
            self._release()
            try:
                self._socket = listen(self._addr, self._port)
            except RendezvousError as err:
                self.on_failed(str(err))
                return
        self._served = True
        self.on_joined(
            World(
                attempt=attempt,
                nnodes=1,
                node_rank=0,
                first_rank=0,
                world_size=self._nproc,
                master_addr=self._addr,
                master_port=self._socket.getsockname()[1],
                store_fd=self._socket.fileno(),
                resume=resume,
            )
        )

    def idle(self, idle: bool) -> None:
        """Do nothing: there is no other node."""

    def others_idle_s(self) -> float | None:
        """For ever."""
        return math.inf

    def succeeded(self) -> None:
        """Success here is the success of all."""
        self._soon(lambda: self.on_peers_done())

    def failed(self, cause: Cause) -> None:
        """Do nothing: there is no other node."""

    def judge(self, cause: Cause) -> None:
        """The restart policy alone decides."""
        self.on_judged(self._policy.decide(failure_of(cause, at_s=self._loop.now())), "")

    def leave(self) -> bool:
        """At any time."""
        return True

    def close(self) -> None:
        """Release the port."""
        self._closed = True
        self._release()

    def _soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_at(self._loop.now(), lambda: None if self._closed else callback())

    def _release(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
