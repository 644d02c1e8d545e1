"""Several nodes over real sockets on loopback, turned by one loop: they meet, fail, go on, leave; strangers come."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpulaunch.launcher.rendezvous import dial, listen
from gpulaunch.launcher.rendezvous.base import RendezvousError
from gpulaunch.launcher.rendezvous.connection import Pace
from gpulaunch.launcher.rendezvous.leader import Leader
from gpulaunch.launcher.rendezvous.messages import MAX_LINE_BYTES, Ended, Hello, Ready, Refused, Welcome, decode, encode

Nodes = Callable[..., list[Any]]
PORT_LINE = "127.0.0.1:{}"


def hello(**changes: Any) -> bytes:
    said = {"run_id": "test", "nnodes": 2, "node_rank": 1, "nproc": 2, "host": "other", "max_restarts": 0, **changes}
    return encode(Hello(**said))


def port_of(recorder: Any) -> int:
    return int(recorder.rendezvous.master_port)


# -- meeting


def test_nodes_of_different_sizes_meet_and_ranks_follow_node_ranks(gathered: Nodes) -> None:
    nodes = gathered(1, 4, 2)

    worlds = [node.worlds[0] for node in nodes]
    assert [world.first_rank for world in worlds] == [0, 1, 5]
    assert {world.world_size for world in worlds} == {7}
    assert {(world.attempt, world.nnodes, world.master_addr) for world in worlds} == {(0, 3, "127.0.0.1")}
    assert [world.node_rank for world in worlds] == [0, 1, 2]
    assert {world.master_port for world in worlds} == {port_of(nodes[0])}
    assert [world.store_fd is not None for world in worlds] == [True, False, False]


def test_one_static_node_needs_nobody(turning: Any, node: Callable[..., Any]) -> None:
    alone = node(0, nnodes=1)
    alone.join()
    assert alone.worlds == []
    turning.until(lambda: alone.worlds)
    alone.tell(ok=True)
    assert alone.done == 0
    turning.until(lambda: alone.done)


def test_followers_may_be_there_long_before_the_leader(turning: Any, node: Callable[..., Any]) -> None:
    with socket.socket() as reserved:  # bound but not listening: refuses, and stays ours
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        follower = node(1, port=port)
        follower.join()
        turning.until(lambda: follower.rendezvous._post._dialer.trouble == "Connection refused")
        leader = node(0, port=port)
    leader.join()

    turning.until(lambda: leader.worlds and follower.worlds)


def test_a_leader_that_still_looks_for_its_checkpoint_keeps_the_others_waiting_and_not_lost(
    turning: Any, nodes: Nodes
) -> None:
    """A search can take minutes; a follower that hears nothing for `lost_s` hangs up."""
    leader, follower = nodes(1, 1, pace=Pace(beat_s=0.05, lost_s=0.5, note_s=60.0))
    leader.rendezvous.open()
    follower.join()
    late = turning.loop.now() + 1.5
    turning.until(lambda: turning.loop.now() > late)
    assert (leader.worlds, follower.failed, leader.peer_failed) == ([], [], [])

    leader.join()

    turning.until(lambda: leader.worlds and follower.worlds)


def test_a_follower_that_was_started_again_takes_its_place(turning: Any, nodes: Nodes, node: Any) -> None:
    leader, first, second = nodes(1, 1, 1)
    leader.join()
    first.join()
    turning.until(lambda: leader.rendezvous._post._group.missing == [2])
    first.rendezvous.close()
    turning.until(lambda: leader.rendezvous._post._group.missing == [1, 2])
    again = node(1, port=port_of(leader), nnodes=3)
    again.join()
    second.join()

    turning.until(lambda: leader.worlds and again.worlds and second.worlds)


def test_a_leader_that_was_started_again_is_found(turning: Any, node: Callable[..., Any]) -> None:
    leader = node(0, nnodes=3)
    port = port_of(leader)
    follower = node(1, port=port, nnodes=3)
    leader.join()
    follower.join()
    turning.until(lambda: leader.rendezvous._post._group.missing == [2])
    leader.rendezvous.close()
    again = node(0, port=port, nnodes=3)
    again.join()
    turning.until(lambda: again.rendezvous._post._group.missing == [2])

    assert follower.failed == []
    assert follower.peer_failed == []


def test_a_name_is_looked_up_without_holding_the_loop(
    turning: Any, node: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name server is stuck; the loop still turns, and the node joins when the answer comes."""
    look_up = listen.resolve
    stuck = threading.Event()

    def slow(host: str, port: int, *, numeric: bool = False) -> Any:
        if not numeric:
            assert stuck.wait(60), "the loop should have turned meanwhile"
        return look_up(host, port, numeric=numeric)

    monkeypatch.setattr(dial, "resolve", slow)
    leader = node(0, master_addr="localhost")
    follower = node(1, port=port_of(leader), master_addr="localhost")
    leader.join()
    follower.join()
    turned: list[bool] = []
    turning.loop.call_at(turning.loop.now() + 0.05, lambda: turned.append(True))
    turning.until(lambda: turned)
    stuck.set()

    turning.until(lambda: leader.worlds and follower.worlds)


# -- how attempts end


def test_all_well(turning: Any, gathered: Nodes) -> None:
    nodes = gathered(1, 1, 1)
    nodes[0].tell(ok=True)
    nodes[1].tell(ok=True)
    turning.for_s(0.2)
    assert [node.done for node in nodes] == [0, 0, 0]

    nodes[2].tell(ok=True)
    assert [node.done for node in nodes] == [0, 0, 0], "never from within tell"
    turning.until(lambda: all(node.done for node in nodes))
    assert [node.peer_failed for node in nodes] == [[], [], []]


def test_the_leader_waits_until_the_others_have_left_and_no_longer(turning: Any, gathered: Nodes) -> None:
    """Followers leave as soon as they have read that all is done: the leader's bound, here an hour, is not used up."""
    nodes = gathered(1, 1, 1, pace=Pace(beat_s=0.05, lost_s=3600.0))
    for node in nodes:
        node.tell(ok=True)

    turning.until(lambda: all(node.done for node in nodes))


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "lingers"])
def test_the_leader_is_the_last_to_leave(turning: Any, node: Callable[..., Any], leaves: bool) -> None:
    leader = node(0, pace=Pace(beat_s=0.05, lost_s=60.0 if leaves else 3.0))
    leader.join()
    follower = turning.client(port_of(leader))
    follower.sendall(hello() + encode(Ready(attempt=0)))
    turning.until(lambda: leader.worlds)
    follower.sendall(encode(Ended(attempt=0, ok=True, final=False, why="")))
    leader.tell(ok=True)
    turning.for_s(0.3)
    assert leader.done == 0, "a follower is still there"

    if leaves:
        follower.close()
    turning.until(lambda: leader.done)
    assert leader.peer_failed == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_restarts_all_nodes_together(turning: Any, gathered: Nodes, failing: int) -> None:
    nodes = gathered(2, 2, 2)
    others = [node for rank, node in enumerate(nodes) if rank != failing]
    nodes[failing].tell(ok=False, why="rank 5 failed")
    nodes[failing].join(1)
    turning.until(lambda: all(node.peer_failed for node in others))
    assert {tuple(node.peer_failed) for node in others} == {
        ((False, f"node {failing} (host-{failing}): rank 5 failed"),)
    }

    others[0].tell(ok=False)
    others[0].join(1)
    turning.for_s(0.2)
    assert all(node.attempts == [0] for node in nodes), "the ranks of one node are still alive"

    others[1].tell(ok=False)
    others[1].join(1)
    turning.until(lambda: all(node.attempts == [0, 1] for node in nodes))
    assert nodes[failing].peer_failed == []
    assert nodes[0].worlds[0].store_fd == nodes[0].worlds[1].store_fd


def test_a_node_that_was_done_is_called_back(turning: Any, gathered: Nodes) -> None:
    leader, follower = gathered(1, 1)
    follower.tell(ok=True)
    leader.tell(ok=False, why="rank 0 failed")
    leader.join(1)
    turning.until(lambda: follower.peer_failed)
    follower.join(1)

    turning.until(lambda: leader.attempts == [0, 1] and follower.attempts == [0, 1])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_final_failure_is_heard_though_its_node_leaves_at_once(turning: Any, gathered: Nodes, failing: int) -> None:
    nodes = gathered(1, 1, 1)
    nodes[failing].tell(ok=False, final=True, why="rank 5 failed")
    nodes[failing].rendezvous.close()
    others = [node for rank, node in enumerate(nodes) if rank != failing]
    turning.until(lambda: all(node.peer_failed for node in others))
    turning.for_s(0.2)

    assert [node.peer_failed for node in others] == [
        [(True, f"node {failing} (host-{failing}): rank 5 failed")] for _ in others
    ]


@pytest.mark.parametrize(("leaving", "others"), [(0, (1, 2)), (1, (0, 2))])
def test_a_node_that_leaves_in_mid_run_is_gone_for_all(
    turning: Any, gathered: Nodes, leaving: int, others: tuple[int, ...]
) -> None:
    nodes = gathered(1, 1, 1)
    nodes[leaving].rendezvous.close()
    turning.until(lambda: all(nodes[rank].peer_failed for rank in others))

    for rank in others:
        ((final, why),) = nodes[rank].peer_failed
        assert final
        assert why == f"node {leaving} (host-{leaving}) is gone: connection closed"


def test_silence_is_a_loss_and_beats_are_not(turning: Any, node: Callable[..., Any]) -> None:
    """A node that says nothing counts as gone in time; one that only beats does not, however long."""
    pace = Pace(beat_s=0.05, lost_s=1.0)
    leader = node(0, nnodes=3, pace=pace)
    beating = node(1, port=port_of(leader), nnodes=3, pace=pace)
    leader.join()
    beating.join()
    mute = turning.client(port_of(leader))
    mute.sendall(hello(node_rank=2, nnodes=3) + b'{"gpulaunch": 2, "say": "ready", "attempt": 0}\n')
    turning.until(lambda: leader.worlds and beating.worlds)
    turning.until(lambda: leader.peer_failed and beating.peer_failed)

    assert leader.peer_failed == [(True, "node 2 (other) is gone: no word from it for 1 s")]
    assert beating.peer_failed == [(True, "node 2 (other) is gone: no word from it for 1 s")]


def test_a_silent_leader_is_a_loss(turning: Any, node: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as fake:
        follower = node(1, port=fake.getsockname()[1], pace=Pace(beat_s=0.05, lost_s=0.5))
        follower.join()
        turning.until(lambda: _readable(fake))
        sock, _ = fake.accept()
        with sock:
            go = b'{"gpulaunch": 2, "say": "go", "attempt": 0, "first_rank": 1, "world_size": 2}\n'
            sock.sendall(encode(Welcome(host="fake")) + go)
            turning.until(lambda: follower.worlds)
            turning.until(lambda: follower.peer_failed)

    assert follower.peer_failed == [(True, "node 0 (fake) is gone: no word from it for 0.5 s")]


def test_a_loop_that_was_held_up_itself_does_not_blame_the_others(turning: Any, gathered: Nodes) -> None:
    """A process that was stopped wakes up and finds that time went by; the positive control is the silence above."""
    leader, follower = gathered(1, 1, pace=Pace(beat_s=1.0, lost_s=2.0))
    turning.for_s(0.1)  # between two beats: nothing lies in a buffer
    real = turning.loop.now
    turning.loop.now = lambda: real() + 60.0
    turning.for_s(0.5)

    assert leader.peer_failed == []
    assert follower.peer_failed == []


def _readable(sock: socket.socket) -> bool:
    """For a listening socket: whether somebody waits to be accepted."""
    return bool(select.select([sock], [], [], 0)[0])


# -- what is wrong


def refused(turning: Any, leader: Any, said: bytes) -> str:
    """Say it to the leader; its refusal."""
    stranger = turning.client(port_of(leader))
    stranger.sendall(said)
    stranger.setblocking(False)
    heard = b""

    def answered() -> bool:
        nonlocal heard
        try:
            heard += stranger.recv(65536)
        except BlockingIOError:
            return False
        return bool(heard.endswith(b"\n"))

    turning.until(answered)
    message = decode(heard.splitlines()[-1])
    assert isinstance(message, Refused)
    turning.until(lambda: turning.ended_by_peer(stranger))
    return message.why


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"run_id": "b"}, "run 'b'"),
        ({"nnodes": 5}, "--nnodes 5"),
        ({"node_rank": 7}, "no place"),
        ({"node_rank": 0}, "--node-rank 0 given twice: on host-0 and other"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why_on_both_sides(
    turning: Any, nodes: Nodes, node: Callable[..., Any], changes: dict[str, Any], why: str
) -> None:
    leader, fitting = nodes(1, 1)
    leader.join()
    answer = refused(turning, leader, hello(**changes))

    assert why in answer
    assert leader.notes == [f"refused: {answer}"]
    fitting.join()
    turning.until(lambda: leader.worlds and fitting.worlds)


def test_a_node_rank_given_twice(turning: Any, nodes: Nodes, node: Callable[..., Any]) -> None:
    leader, first, _ = nodes(1, 1, 1)
    leader.join()
    first.join()
    turning.until(lambda: leader.rendezvous._post._group.missing == [2])
    twin = node(1, port=port_of(leader), nnodes=3, host="twin")
    twin.join()
    turning.until(lambda: twin.failed)

    assert twin.failed == ["--node-rank 1 given twice: on host-1 and twin"]
    assert leader.notes == ["refused: --node-rank 1 given twice: on host-1 and twin"]
    assert first.failed == []


def test_another_version_is_told_on_both_sides(turning: Any, nodes: Nodes) -> None:
    leader, _ = nodes(1, 1)
    leader.join()

    answer = refused(turning, leader, b'{"gpulaunch": 3, "say": "hello"}\n')
    expected = "127.0.0.1 speaks version 3 of the protocol, not 2; install the same gpulaunch on all nodes"
    assert answer == expected
    assert leader.notes == [f"refused: {expected}"]


def test_a_leader_of_another_version_ends_the_search(turning: Any, node: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as newer:
        port = newer.getsockname()[1]
        follower = node(1, port=port)
        follower.join()
        turning.until(lambda: _readable(newer))
        sock, _ = newer.accept()
        with sock:
            sock.sendall(b'{"gpulaunch": 3, "say": "welcome"}\n')
            turning.until(lambda: follower.failed)

    assert follower.failed == [
        f"node 0 at 127.0.0.1:{port} speaks version 3 of the protocol, not 2; install the same gpulaunch on all nodes"
    ]


def test_a_port_in_use_fails_at_once(node: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RendezvousError) as caught:
        node(0, port=taken.getsockname()[1])

    assert f"process {os.getpid()} (" in str(caught.value)


def test_nobody_comes(turning: Any, node: Callable[..., Any]) -> None:
    leader = node(0, nnodes=3, timeout_s=0.5, pace=Pace(beat_s=0.05, note_s=0.1))
    follower = node(1, port=port_of(leader), nnodes=3)
    follower.join()
    leader.join()
    turning.until(lambda: leader.failed and follower.failed)

    where = PORT_LINE.format(port_of(leader))
    assert leader.failed[0].startswith(f"waited 0.5 s for node 2 of 3 at {where}; start gpulaunch there")
    assert follower.failed == [f"node 0 (host-0) gave up: waited 0.5 s for node 2 of 3 at {where}"]
    assert leader.notes[0].endswith(f"of 3 at {where}")
    assert "\n" not in leader.failed[0]
    leader.tell(ok=False, final=True)
    follower.tell(ok=False, final=True)
    turning.for_s(0.1)
    assert (leader.peer_failed, follower.peer_failed) == ([], []), "one answer to a join"


def test_nobody_is_there(turning: Any, node: Callable[..., Any]) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        follower = node(1, port=port, timeout_s=0.5, pace=Pace(note_s=0.2))
        follower.join()
        turning.until(lambda: follower.failed)

    expected = (
        f"could not reach node 0 at 127.0.0.1:{port} in 0.5 s (Connection refused); check that gpulaunch runs there, "
        "--master-addr and --master-port, and the firewall"
    )
    assert follower.failed == [expected]
    assert follower.notes == [f"waiting for node 0 at 127.0.0.1:{port} (Connection refused)"]


def test_a_name_that_is_nobody(turning: Any, node: Callable[..., Any]) -> None:
    follower = node(1, port=29500, master_addr="no-such-host.invalid", timeout_s=1.0)
    follower.join()
    turning.until(lambda: follower.failed)

    assert "could not reach node 0 at no-such-host.invalid:29500" in follower.failed[0]
    assert "(name not resolved: " in follower.failed[0] or "(no answer yet)" in follower.failed[0]


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "what answers there is not gpulaunch"),
        (b"", "it closes the connection: the job runs already, or another program listens there"),
        (None, "it takes connections, but does not answer as gpulaunch"),
    ],
    ids=["another program", "closes", "says nothing"],
)
def test_something_else_listens_there(
    turning: Any, node: Callable[..., Any], answer: bytes | None, trouble: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        kept: list[socket.socket] = []

        def serve() -> None:
            sock, _ = other.accept()
            sock.sendall(answer or b"")
            if answer == b"":
                sock.shutdown(socket.SHUT_WR)
            kept.append(sock)

        turning.loop.watch_read(other.fileno(), serve)
        follower = node(1, port=other.getsockname()[1], timeout_s=1.0, pace=Pace(beat_s=0.05, lost_s=0.3))
        follower.join()
        turning.until(lambda: follower.failed)
        turning.loop.unwatch_read(other.fileno())
        for sock in kept:
            sock.close()

    assert trouble in follower.failed[0]


# -- strangers


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x09\x3c\x85\xf7\x38",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"{" + b"a" * 2 * MAX_LINE_BYTES,
        b'{"gpulaunch": 2, "say": "ready", "attempt": 0}\n',
        json.dumps({"gpulaunch": 2, "say": "hello", "node_rank": "1"}).encode() + b"\n",
    ],
    ids=["torch store client", "http", "endless line", "no hello", "bad hello"],
)
def test_garbage_is_dropped_and_the_nodes_still_meet(turning: Any, nodes: Nodes, garbage: bytes) -> None:
    leader, follower = nodes(1, 1)
    leader.join()
    stranger = turning.client(port_of(leader))
    stranger.sendall(garbage)
    turning.until(lambda: turning.ended_by_peer(stranger))
    follower.join()

    turning.until(lambda: leader.worlds and follower.worlds)
    assert leader.peer_failed == []


def test_the_idle_and_the_slow_are_shown_out(turning: Any, nodes: Nodes) -> None:
    leader, follower = nodes(1, 1, pace=Pace(beat_s=0.05, lost_s=0.5))
    leader.join()
    idle, slow = turning.client(port_of(leader)), turning.client(port_of(leader))
    letters = iter(hello().rstrip(b"\n") * 1_000)

    def both_out() -> bool:
        try:
            slow.send(bytes([next(letters)]))
        except (BlockingIOError, ConnectionError):
            pass
        return bool(turning.ended_by_peer(idle) and turning.ended_by_peer(slow))

    turning.until(both_out)
    follower.join()
    turning.until(lambda: leader.worlds and follower.worlds)


def test_a_crowd_of_strangers_does_not_keep_a_node_out(turning: Any, nodes: Nodes) -> None:
    leader, follower = nodes(1, 1, pace=Pace(beat_s=0.05, lost_s=60.0))
    leader.join()
    for _ in range(200):
        turning.client(port_of(leader))
    turning.for_s(0.5)
    post = leader.rendezvous._post
    assert isinstance(post, Leader)
    assert len(post._guests) <= 66
    follower.join()

    turning.until(lambda: leader.worlds and follower.worlds)
    assert post._guests == {}


def test_who_knocks_often_does_not_fill_the_screen(turning: Any, nodes: Nodes) -> None:
    leader, _ = nodes(1, 1)
    leader.join()
    for _ in range(5):
        stranger = turning.client(port_of(leader))
        stranger.sendall(b"\x09")
        turning.until(lambda: turning.ended_by_peer(stranger))  # noqa: B023  # used at once

    assert leader.notes == ["refused: what connected from 127.0.0.1 is not gpulaunch; start gpulaunch on every node"]


def test_out_of_descriptors_the_leader_looks_away_for_a_moment(
    turning: Any, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, follower = nodes(1, 1)
    leader.join()
    post = leader.rendezvous._post
    listener = post._listener
    tries: list[int] = []

    class Exhausted:
        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

        def accept(self) -> Any:
            tries.append(1)
            raise OSError(24, "Too many open files")

    post._listener = Exhausted()
    follower.join()
    turning.until(lambda: tries)
    turning.for_s(0.3)
    assert len(tries) == 1, "no spinning"

    post._listener = listener
    turning.until(lambda: leader.worlds and follower.worlds)
    assert leader.notes == ["cannot accept a connection: Too many open files"]


def test_when_all_are_there_the_socket_belongs_to_the_store(turning: Any, gathered: Nodes) -> None:
    """Who connects from then on is left to the store: the leader does not take its connections away."""
    leader, _ = gathered(1, 1)
    early = turning.client(port_of(leader))
    turning.for_s(0.2)

    with socket.socket(fileno=os.dup(leader.worlds[0].store_fd)) as store:
        store.settimeout(10)
        accepted, address = store.accept()
        accepted.close()
        assert address == early.getsockname()


def test_different_budgets_are_pointed_out(turning: Any, node: Callable[..., Any]) -> None:
    leader = node(0, max_restarts=3)
    follower = node(1, port=port_of(leader), max_restarts=1)
    leader.join()
    follower.join()
    turning.until(lambda: leader.worlds)

    assert leader.notes == ["--max-restarts differs between node 0 and node 1; the least rules (1)"]


def test_a_connection_to_itself_is_no_leader(turning: Any) -> None:
    """The kernel may connect a socket to itself when nobody listens on a port of this machine."""
    with socket.socket() as sock, socket.socket() as other:
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        assert dial._is_itself(sock)

        with socket.create_server(("127.0.0.1", 0)) as server:
            other.connect(server.getsockname())
            assert not dial._is_itself(other)


# -- where the leader listens


@pytest.mark.parametrize(
    ("means", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.1.1", "any"), ("192.0.2.1", "any"), (None, "any")],
    ids=["loopback address", "own name on Debian", "service address", "unknown name"],
)
def test_the_leader_listens_where_the_others_come(
    node: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, means: str | None, bound: str
) -> None:
    def resolve(host: str, port: int) -> Any:
        if means is None:
            raise OSError(-2, "Name or service not known")
        return [(socket.AF_INET, (means, port))]

    monkeypatch.setattr(listen, "resolve", resolve)
    leader = node(0, master_addr=means if bound != "any" or means == "192.0.2.1" else "master")

    address = leader.rendezvous._post._listener.getsockname()[0]
    assert address == bound if bound != "any" else address in ("::", "0.0.0.0")


def test_it_needs_little_when_it_is_imported() -> None:
    """The agent stays small: no threads, no random, no asyncio, no typing beyond what dataclasses bring."""
    heavy = ("asyncio", "logging", "random", "subprocess", "ssl", "email", "threading")
    code = f"import sys, gpulaunch.launcher.rendezvous.static\nprint([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert out.strip() == "[]"
