"""A loop to turn by hand, and nodes whose agent only writes down what it is called with."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.launcher.rendezvous.base import Rendezvous, World
from gpulaunch.launcher.rendezvous.connection import Pace
from gpulaunch.launcher.rendezvous.static import StaticRendezvous

LIMIT_S = 60.0


class Turning:
    """A real loop, turned until something has happened."""

    def __init__(self) -> None:
        self.loop = Loop()
        self._sockets: list[socket.socket] = []

    def until(self, happened: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            assert time.monotonic() < deadline, "did not happen"
            self.loop.turn(0.02)

    def for_s(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.loop.turn(0.02)

    def client(self, port: int, host: str = "127.0.0.1") -> socket.socket:
        """A stranger's connection."""
        sock = socket.create_connection((host, port), timeout=LIMIT_S)
        self._sockets.append(sock)
        return sock

    def ended_by_peer(self, sock: socket.socket) -> bool:
        """Whether the other side has closed; what it said before is thrown away."""
        sock.setblocking(False)
        try:
            while sock.recv(65536):
                pass
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        return True

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self.loop.close()


class Recorder:
    """An agent that only writes down what it hears."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.worlds: list[World] = []
        self.failed: list[str] = []
        self.peer_failed: list[tuple[bool, str]] = []
        self.peer_preempted: list[str] = []
        self.done = 0
        self.notes: list[str] = []
        rendezvous.on_joined = self.worlds.append
        rendezvous.on_failed = self.failed.append
        rendezvous.on_peer_failed = lambda final, why: self.peer_failed.append((final, why))
        rendezvous.on_node_lost = lambda why: self.peer_failed.append((True, why))
        rendezvous.on_peer_preempted = lambda why: self.peer_preempted.append(why)
        rendezvous.on_peers_done = self._count_done
        if isinstance(rendezvous, StaticRendezvous):
            rendezvous.on_note = self.notes.append

    def _count_done(self) -> None:
        self.done += 1

    @property
    def attempts(self) -> list[int]:
        return [world.attempt for world in self.worlds]

    def join(self, attempt: int = 0) -> None:
        self.rendezvous.join(attempt)

    def tell(self, *, ok: bool, final: bool = False, why: str = "") -> None:
        self.rendezvous.tell(ok=ok, final=final, why=why)


@pytest.fixture
def turning() -> Iterator[Turning]:
    turning = Turning()
    yield turning
    turning.close()


@pytest.fixture
def record() -> Iterator[Callable[[Rendezvous], Recorder]]:
    recorders: list[Recorder] = []

    def make(rendezvous: Rendezvous) -> Recorder:
        recorders.append(Recorder(rendezvous))
        return recorders[-1]

    yield make
    for recorder in recorders:
        recorder.rendezvous.close()


@pytest.fixture
def node(turning: Turning, record: Callable[[Rendezvous], Recorder]) -> Callable[..., Recorder]:
    """One node of a static job on loopback, named host-R; node 0 chooses its port."""

    def make(rank: int, *, port: int = 0, **options: Any) -> Recorder:
        settings: dict[str, Any] = {
            "run_id": "test",
            "nnodes": 2,
            "nproc": 2,
            "master_addr": "127.0.0.1",
            "host": f"host-{rank}",
            "pace": Pace(beat_s=0.05, lost_s=5.0, note_s=60.0),
            **options,
        }
        return record(StaticRendezvous(turning.loop, node_rank=rank, master_port=port, **settings))

    return make


@pytest.fixture
def nodes(node: Callable[..., Recorder]) -> Callable[..., list[Recorder]]:
    """All nodes of a job; the leader first, so that the port is known."""

    def make(*nprocs: int, **options: Any) -> list[Recorder]:
        leader = node(0, nnodes=len(nprocs), nproc=nprocs[0], **options)
        assert isinstance(leader.rendezvous, StaticRendezvous)
        port = leader.rendezvous.master_port
        others = [
            node(rank, port=port, nnodes=len(nprocs), nproc=nproc, **options)
            for rank, nproc in enumerate(nprocs)
            if rank > 0
        ]
        return [leader, *others]

    return make


@pytest.fixture
def gathered(turning: Turning, nodes: Callable[..., list[Recorder]]) -> Callable[..., list[Recorder]]:
    """All nodes of a job, in attempt 0."""

    def make(*nprocs: int, **options: Any) -> list[Recorder]:
        made = nodes(*nprocs, **options)
        for each in made:
            each.join()
        turning.until(lambda: all(each.worlds for each in made))
        return made

    return make
