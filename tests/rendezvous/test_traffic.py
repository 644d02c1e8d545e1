"""What the leader sends and receives as a group forms: as much for each node, however many there are."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from gpulaunch.launcher.rendezvous.messages import Planned, Register, Reported, decode, encode
from gpulaunch.launcher.rendezvous.plan import NodeState, Report, Stage


def formed(turning: Any, leader: Any, nnodes: int) -> tuple[float, list[int]]:
    """Let the other nodes join as sockets; how long it took until all know the group, and the bytes sent to each."""
    register = encode(Register(run_id="test", min_nodes=nnodes, max_nodes=nnodes, max_restarts=3, fixed=True))
    selector = selectors.DefaultSelector()
    heard: dict[socket.socket, bytes] = {}
    waiting = set[socket.socket]()
    began_s = time.monotonic()
    leader.join()
    for order in range(1, nnodes):
        sock = turning.client(leader.rendezvous.port)
        report = Report(node=f"n{order}", host=f"host-{order}", order=order, nproc=8, state=NodeState.READY)
        sock.sendall(register + encode(Reported(report=report)))
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ)
        heard[sock] = b""
        waiting.add(sock)
        turning.loop.turn(0)

    def all_know() -> bool:
        for key, _ in selector.select(0):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            heard[sock] += sock.recv(1 << 20)
            lines = [decode(line) for line in heard[sock].split(b"\n")[:-1]]
            if any(isinstance(each, Planned) and each.plan.stage is Stage.RUNNING for each in lines):
                waiting.discard(sock)
        return not waiting

    turning.until(all_know)
    selector.close()
    return time.monotonic() - began_s, [len(each) for each in heard.values()]


def test_a_node_is_sent_as_much_in_a_large_group_as_in_a_small_one(turning: Any, node: Callable[..., Any]) -> None:
    small, large = (formed(turning, node(0, nnodes=number), number)[1] for number in (16, 256))

    assert max(large) <= 1.1 * max(small), "bytes"
