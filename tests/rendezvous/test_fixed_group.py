"""Nodes with fixed ranks over loopback, in one process: they meet, fail, go on, leave; strangers come."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest

from gpulaunch.launcher.policy.restart import Limits
from gpulaunch.launcher.rendezvous import dial, listen, member, membership, plan_server
from gpulaunch.launcher.rendezvous.base import RendezvousError
from gpulaunch.launcher.rendezvous.connection import Connection
from gpulaunch.launcher.rendezvous.messages import MAX_LINE_BYTES, Refused, Register, Reported, decode, encode
from gpulaunch.launcher.rendezvous.plan import NodeState, Report, Stage

Nodes = Callable[..., list[Any]]


def hello(
    order: int = 1, nnodes: int = 2, run_id: str = "test", *, fixed: bool = True, replicate: bool = False
) -> bytes:
    """What a node says first."""
    register = Register(
        run_id=run_id, min_nodes=nnodes, max_nodes=nnodes, max_restarts=3, fixed=fixed, replicate=replicate
    )
    report = Report(node="n", host="other", order=order, nproc=2, state=NodeState.READY)
    return encode(register) + encode(Reported(report=report))


def port_of(recorder: Any) -> int:
    return int(recorder.rendezvous.port)


def connected(turning: Any, node: Any) -> None:
    """Wait until the leader has answered it."""
    turning.until(lambda: node.rendezvous.plan.job)


def listening() -> set[tuple[str, int]]:
    """Where this process listens."""
    found = psutil.Process().net_connections(kind="tcp")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


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


def test_the_others_may_be_there_long_before_node_0(turning: Any, node: Callable[..., Any]) -> None:
    with socket.socket() as reserved:  # bound but not listening: refuses, and stays ours
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        other = node(1, port=port)
        other.join()
        turning.for_s(0.3)  # refused
        leader = node(0, port=port)
    leader.join()

    turning.until(lambda: leader.worlds and other.worlds)


def test_a_node_that_still_looks_for_its_checkpoint_is_waited_for(turning: Any, nodes: Nodes) -> None:
    """A search can take longer than the others wait for a node that is not there."""
    leader, other = nodes(1, 1, timeout_s=1.5)
    leader.rendezvous.open()
    other.join()
    turning.for_s(2.5)
    assert (leader.worlds, leader.over, other.over) == ([], [], [])

    leader.join()

    turning.until(lambda: leader.worlds and other.worlds)


def test_a_node_that_was_started_again_takes_its_place(turning: Any, nodes: Nodes, node: Any) -> None:
    leader, first, second = nodes(1, 1, 1)
    leader.join()
    first.join()
    connected(turning, first)
    first.rendezvous.close()
    again = node(1, port=port_of(leader), nnodes=3, host="again")
    again.join()
    connected(turning, again)
    turning.for_s(0.2)
    assert leader.worlds == [], "the dead one is not counted"
    second.join()

    turning.until(lambda: leader.worlds and again.worlds and second.worlds)


def test_a_leader_that_was_started_again_is_found(turning: Any, node: Callable[..., Any]) -> None:
    leader = node(0)
    port = port_of(leader)
    other = node(1, port=port)
    other.join()
    leader.rendezvous.open()
    connected(turning, other)
    leader.rendezvous.close()
    again = node(0, port=port)
    again.join()

    turning.until(lambda: again.worlds and other.worlds)


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
    leader = node(0, addr="localhost")
    other = node(1, port=port_of(leader), addr="localhost")
    leader.join()
    other.join()
    turned: list[bool] = []
    turning.loop.call_at(turning.loop.now() + 0.05, lambda: turned.append(True))
    turning.until(lambda: turned)
    stuck.set()

    turning.until(lambda: leader.worlds and other.worlds)


# -- how attempts end


def test_all_well(turning: Any, gathered: Nodes) -> None:
    nodes = gathered(1, 1, 1)
    for node in nodes[:2]:
        node.rendezvous.succeeded()
    turning.for_s(0.2)
    assert [node.done for node in nodes] == [0, 0, 0]

    nodes[2].rendezvous.succeeded()
    assert [node.done for node in nodes] == [0, 0, 0], "never from within the call"
    turning.until(lambda: all(node.done for node in nodes))
    assert [node.peer_failed for node in nodes] == [[], [], []]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_restarts_all_nodes_together(turning: Any, gathered: Nodes, failing: int) -> None:
    nodes = gathered(2, 2, 2)
    others = [node for rank, node in enumerate(nodes) if rank != failing]
    nodes[failing].fail()
    turning.until(lambda: all(node.peer_failed for node in others))
    why = f"node {failing} (host-{failing}): rank 5 failed"
    assert [node.peer_failed for node in others] == [[(False, why)]] * 2

    others[0].follow()
    turning.for_s(0.2)
    assert not any(node.judged for node in nodes), "the ranks of one node are still alive"

    others[1].follow()
    turning.until(lambda: all(node.judged for node in nodes))
    assert all(node.judged[0][0].again for node in nodes)
    for node in nodes:
        node.join(1)
    turning.until(lambda: all(node.attempts == [0, 1] for node in nodes))
    assert nodes[failing].peer_failed == []
    assert nodes[0].worlds[0].store_fd == nodes[0].worlds[1].store_fd


def test_a_final_failure_ends_the_job_on_every_node(turning: Any, gathered: Nodes) -> None:
    nodes = gathered(1, 1, 1)
    nodes[1].fail(final=True, exit_code=9)
    turning.until(lambda: nodes[0].peer_failed and nodes[2].peer_failed)
    for node in (nodes[0], nodes[2]):
        node.follow()
    turning.until(lambda: all(node.judged for node in nodes))

    assert {(node.judged[0][0].again, node.judged[0][0].code) for node in nodes} == {(False, 9)}
    assert [node.judged[0][1] for node in nodes] == ["node 1 (host-1): rank 5 failed", "", nodes[0].judged[0][1]]


def test_a_node_that_is_lost_ends_the_job(turning: Any, gathered: Nodes) -> None:
    nodes = gathered(1, 1, 1)
    nodes[1].rendezvous.close()
    turning.until(lambda: nodes[0].peer_failed and nodes[2].peer_failed)
    nodes[0].follow()
    nodes[2].follow()
    turning.until(lambda: nodes[0].judged and nodes[2].judged)
    for node in (nodes[0], nodes[2]):
        decision, why = node.judged[0]
        assert (decision.again, decision.code) == (False, 75)
        assert why.startswith("node 1 (host-1) is lost")


def test_a_node_that_is_lost_before_the_next_attempt_ends_the_job(turning: Any, gathered: Nodes) -> None:
    leader, other = gathered(1, 1)
    leader.fail()
    turning.until(lambda: other.peer_failed)
    other.follow()
    turning.until(lambda: leader.judged and other.judged)
    leader.join(1)
    other.rendezvous.close()

    turning.until(lambda: leader.over)
    ((code, why),) = leader.over
    assert code == 75
    assert why.startswith("node 1 (host-1) is lost")


def test_without_node_0_the_job_ends_at_once(turning: Any, gathered: Nodes) -> None:
    leader, other = gathered(1, 1)
    leader.rendezvous.close()  # without a word, as the kernel does for a process that was killed

    turning.until(lambda: other.peer_failed)
    assert other.peer_failed == [(True, "node 0 (host-0) is gone: Connection refused")]


def test_one_that_lost_its_connection_finds_node_0_beside_the_store(
    turning: Any, gathered: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted: list[Connection] = []

    def accept(*args: Any, **options: Any) -> Connection:
        accepted.append(Connection(*args, **options))
        return accepted[-1]

    monkeypatch.setattr(plan_server, "Connection", accept)
    leader, other = gathered(1, 1)
    accepted[0].close()
    turning.until(lambda: len(accepted) == 2)
    other.rendezvous.succeeded()
    leader.rendezvous.succeeded()

    turning.until(lambda: leader.done and other.done)
    assert (leader.peer_failed, other.peer_failed) == ([], [])


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
    ("said", "why"),
    [
        (hello(run_id="b"), "127.0.0.1 belongs to run 'b', node 0 (host-0) to 'test'; check --rdzv-id"),
        (
            hello(nnodes=5),
            "127.0.0.1 was started with --nnodes 5, node 0 (host-0) with 2; use the same on all nodes",
        ),
        (
            hello(fixed=False),
            "127.0.0.1 was started with --rdzv-endpoint, node 0 (host-0) with --master-addr; use the same on all nodes",
        ),
        (
            hello(replicate=True),
            "127.0.0.1 was started with --replicate, node 0 (host-0) without it; use the same on all nodes",
        ),
        (hello(7), "other has no place in --nnodes 2; --node-rank counts from 0 to 1"),
        (hello(0), "--node-rank 0 given twice: on host-0 and other"),
        (
            b'{"gpulaunch": 2, "say": "hello"}\n',
            "127.0.0.1 speaks version 2 of the protocol, not 3; install the same gpulaunch on all nodes",
        ),
    ],
    ids=["run", "nnodes", "fixed", "replicate", "rank", "rank 0", "version"],
)
def test_a_node_that_does_not_fit_is_told_why_on_both_sides(turning: Any, nodes: Nodes, said: bytes, why: str) -> None:
    leader, fitting = nodes(1, 1)
    leader.join()
    answer = refused(turning, leader, said)

    assert answer == why
    assert leader.notes == [f"refused: {answer}"]
    fitting.join()
    turning.until(lambda: leader.worlds and fitting.worlds)


def test_a_node_rank_given_twice(turning: Any, nodes: Nodes, node: Callable[..., Any]) -> None:
    leader, first, _ = nodes(1, 1, 1)
    leader.join()
    first.join()
    connected(turning, first)
    twin = node(1, port=port_of(leader), nnodes=3, host="twin")
    twin.join()
    turning.until(lambda: twin.over)

    assert twin.over == [(None, "--node-rank 1 given twice: on host-1 and twin")]
    assert leader.notes == ["refused: --node-rank 1 given twice: on host-1 and twin"]
    assert first.over == []


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_node_takes_the_place_of_one_that_is_silent(
    turning: Any, node: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, forgotten: bool
) -> None:
    """Its connection may be open: the kernel of a machine whose agent is stopped keeps it so."""
    leader = node(0, nnodes=3, silent_s=1.5)
    leader.join()
    silent = turning.client(port_of(leader))
    silent.sendall(hello(nnodes=3))
    turning.until(lambda: select.select([silent], [], [], 0)[0])
    if forgotten:
        monkeypatch.setattr(membership, "FORGET_S", 1.6)
    turning.for_s(2.0)
    again, last = node(1, port=port_of(leader), nnodes=3), node(2, port=port_of(leader), nnodes=3)
    again.join()
    last.join()

    turning.until(lambda: leader.worlds and again.worlds and last.worlds)
    assert again.over == []


def test_what_meets_on_loopback_cannot_be_reached_from_elsewhere(turning: Any, node: Callable[..., Any]) -> None:
    before = listening()
    node(0)

    assert [address for address, _ in listening() - before] == ["127.0.0.1", "127.0.0.1"]


def test_ranks_that_save_after_the_end_are_not_ended_when_node_0_is_gone(
    turning: Any, gathered: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "FENCE_S", 2.0)
    leader, other = gathered(1, 1)
    fenced: list[str] = []
    other.rendezvous.on_fenced = fenced.append
    leader.fail(final=True, exit_code=130)
    turning.until(lambda: other.rendezvous.plan.stage is Stage.STOPPING)
    leader.rendezvous.leave()
    turning.until(lambda: other.rendezvous.plan.stage is Stage.OVER)
    leader.rendezvous.close()
    turning.for_s(2 * member.FENCE_S)
    other.follow()

    turning.until(lambda: other.judged)
    assert len(other.peer_failed) == 1, "only the failure itself"
    assert (fenced, other.judged[0][0].code) == ([], 130)


def test_a_leader_is_not_gone_while_one_of_its_addresses_may_answer(
    turning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as refuses, socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        refuses.bind(("127.0.0.1", 0))
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:  # its backlog is full: no answer
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        addresses = [(socket.AF_INET, refuses.getsockname()), (socket.AF_INET, full.getsockname())]
        monkeypatch.setattr(dial, "resolve", lambda *_, **__: list(addresses))
        dialer = dial.Dialer(turning.loop, "host", 1, try_s=0.2, on_connected=lambda sock: sock.close())
        dialer.start()
        turning.until(lambda: dialer.trouble == "no answer")
        assert not dialer.is_refused
        del addresses[1]
        turning.until(lambda: dialer.is_refused)
        dialer.stop()
        for sock in waiting:
            sock.close()


def test_a_leader_of_another_version_ends_the_search(turning: Any, node: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as newer:
        port = newer.getsockname()[1]
        answering(turning, newer, b'{"gpulaunch": 9, "say": "planned"}\n')
        other = node(1, port=port)
        other.join()
        turning.until(lambda: other.over)
        turning.loop.unwatch_read(newer.fileno())

    why = f"node 0 at 127.0.0.1:{port} speaks version 9 of the protocol, not 3; install the same gpulaunch on all nodes"
    assert other.over == [(None, why)]


def answering(turning: Any, server: socket.socket, answer: bytes | None) -> None:
    """Accept every connection, and send this; None: nothing."""
    server.setblocking(False)

    def serve() -> None:
        sock, _ = server.accept()
        turning.adopt(sock)
        sock.sendall(answer or b"")
        if answer == b"":
            sock.shutdown(socket.SHUT_WR)

    turning.loop.watch_read(server.fileno(), serve)


def test_a_port_in_use_fails_at_once(node: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RendezvousError) as caught:
        node(0, port=taken.getsockname()[1])

    assert f"process {os.getpid()} (" in str(caught.value)


def test_nodes_that_do_not_come_are_named_to_those_that_did(turning: Any, nodes: Nodes) -> None:
    leader, other, _ = nodes(1, 1, 1, timeout_s=0.5)
    leader.join()
    other.join()
    turning.until(lambda: leader.over and other.over)

    assert leader.over == other.over == [(1, "waited 0.5 s for node 2 of 3")]


def test_nobody_is_there(turning: Any, node: Callable[..., Any]) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        other = node(1, port=port, timeout_s=0.5)
        other.join()
        turning.until(lambda: other.over)

    expected = (
        f"waited 0.5 s for node 0 at 127.0.0.1:{port}: Connection refused; check that gpulaunch runs there, "
        "--master-addr and --master-port, and the firewall"
    )
    assert other.over == [(None, expected)]


def test_a_name_that_is_nobody(turning: Any, node: Callable[..., Any]) -> None:
    other = node(1, port=29500, addr="no-such-host.invalid", timeout_s=1.0)
    other.join()
    turning.until(lambda: other.over)

    ((_, why),) = other.over
    assert "node 0 at no-such-host.invalid:29500: " in why
    assert ": name not resolved: " in why or ": no answer yet" in why


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
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering(turning, server, answer)
        other = node(1, port=server.getsockname()[1], timeout_s=1.0)
        other.join()
        turning.until(lambda: other.over)
        turning.loop.unwatch_read(server.fileno())

    assert trouble in other.over[0][1]


# -- strangers


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x09\x3c\x85\xf7\x38",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"{" + b"a" * 2 * MAX_LINE_BYTES,
        b'{"gpulaunch": 3, "say": "bye"}\n',
        b'{"gpulaunch": 3, "say": "register", "run_id": 1}\n',
    ],
    ids=["torch store client", "http", "endless line", "no hello", "bad hello"],
)
def test_garbage_is_dropped_and_the_nodes_still_meet(turning: Any, nodes: Nodes, garbage: bytes) -> None:
    leader, other = nodes(1, 1)
    leader.join()
    stranger = turning.client(port_of(leader))
    stranger.sendall(garbage)
    turning.until(lambda: turning.ended_by_peer(stranger))
    other.join()

    turning.until(lambda: leader.worlds and other.worlds)
    assert leader.peer_failed == []


def test_the_idle_and_the_slow_are_shown_out(turning: Any, nodes: Nodes) -> None:
    leader, other = nodes(1, 1, silent_s=0.5)
    leader.join()
    idle, slow = turning.client(port_of(leader)), turning.client(port_of(leader))
    letters = iter(hello().split(b"\n")[0] * 1_000)

    def both_out() -> bool:
        try:
            slow.send(bytes([next(letters)]))
        except (BlockingIOError, ConnectionError):
            pass
        return bool(turning.ended_by_peer(idle) and turning.ended_by_peer(slow))

    turning.until(both_out)
    other.join()
    turning.until(lambda: leader.worlds and other.worlds)


def test_a_crowd_of_strangers_does_not_keep_a_node_out(turning: Any, nodes: Nodes) -> None:
    leader, other = nodes(1, 1)
    leader.join()
    strangers = [turning.client(port_of(leader)) for _ in range(200)]
    turning.for_s(0.5)
    assert sum(map(turning.ended_by_peer, strangers)) >= 200 - 66
    other.join()

    turning.until(lambda: leader.worlds and other.worlds)


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
    leader, other = nodes(1, 1)
    tries: list[int] = []

    def exhausted(_: Any) -> Any:
        tries.append(1)
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", exhausted)
        leader.join()
        other.join()
        turning.until(lambda: tries)
        turning.for_s(0.3)
        assert len(tries) == 1, "no spinning"

    turning.until(lambda: leader.worlds and other.worlds)
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
    limits = Limits(max_restarts=3, rate=None, backoff_max_s=30.0, no_progress=None)
    leader = node(0, limits=limits)
    other = node(1, port=port_of(leader), limits=replace(limits, max_restarts=1))
    leader.join()
    other.join()
    turning.until(lambda: leader.worlds)

    assert leader.notes == [
        "--max-restarts differs: 1 on 127.0.0.1, 3 on node 0 (host-0), whose number is used",
    ]


def test_a_connection_to_itself_is_no_leader(turning: Any) -> None:
    """The kernel may connect a socket to itself when nothing listens on a port of this machine."""
    with socket.socket() as sock, socket.socket() as other:
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        assert dial.is_itself(sock)

        with socket.create_server(("127.0.0.1", 0)) as server:
            other.connect(server.getsockname())
            assert not dial.is_itself(other)


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
        return [(socket.AF_INET, (means if host else "0.0.0.0", port))]

    monkeypatch.setattr(listen, "resolve", resolve)
    before = listening()
    leader = node(0, addr=means if bound != "any" or means == "192.0.2.1" else "master")

    ((address, _),) = [each for each in listening() - before if each[1] == port_of(leader)]
    assert address == bound if bound != "any" else address in ("::", "0.0.0.0")


def test_it_needs_little_when_it_is_imported() -> None:
    """The agent stays small: no threads, no random, no asyncio, no typing beyond what dataclasses bring."""
    heavy = ("asyncio", "logging", "random", "subprocess", "ssl", "email", "threading")
    code = f"import sys, gpulaunch.launcher.rendezvous.group\nprint([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert out.strip() == "[]"


def test_only_nodes_with_the_token_take_part(turning: Any, node: Callable[..., Any]) -> None:
    token = b"a secret of sixteen bytes"
    leader = node(0, token=token)
    stranger = node(1, port=port_of(leader), timeout_s=1.0)
    other = node(1, port=port_of(leader), token=token)
    for each in (leader, stranger):
        each.join()
    turning.until(lambda: stranger.over)
    assert "asks for a token" in stranger.over[0][1]
    assert leader.worlds == []

    other.join()
    turning.until(lambda: leader.worlds and other.worlds)
    for each in (leader, other):
        each.rendezvous.succeeded()
    turning.until(lambda: leader.done and other.done)
