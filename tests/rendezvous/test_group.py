"""Two or three nodes of an elastic job in one process, over loopback: what their agents are called with."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gpulaunch.launcher.failure.causes import Cause, Tier
from gpulaunch.launcher.failure.classify import Kind
from gpulaunch.launcher.policy.restart import Limits
from gpulaunch.launcher.rendezvous.group import GroupRendezvous
from gpulaunch.launcher.rendezvous.messages import Register, Reported, encode
from gpulaunch.launcher.rendezvous.plan import Keeper, NodeState, Offer, Plan, Report, Seat, Settings
from ports import free_port, has_ipv6

LIMITS = Limits(max_restarts=1, rate=None, backoff_max_s=0.0, no_progress=0)
SETTINGS = Settings(min_nodes=2, max_nodes=2, limits=LIMITS, last_call_s=0.2)
OWN = Cause(text="rank 1 raised ValueError", tier=Tier.OWN, kind=Kind.EXCEPTION, exit_code=3)
TOLD = Cause(text="", tier=Tier.NONE)


@pytest.fixture
def node(turning: Any, record: Callable[..., Any]) -> Callable[..., Any]:
    port = free_port()

    def make(
        name: str, settings: Settings = SETTINGS, order: int | None = None, addr: str = "127.0.0.1", on: Any = turning
    ) -> Any:
        given: dict[str, Any] = {"run_id": "j", "nproc": 2, "port": port, "host": name}
        return record(GroupRendezvous(on.loop, settings=settings, order=order, addr=addr, **given))

    return make


def started(turning: Any, *nodes: Any) -> None:
    """All join, and are in a new world."""
    before = [len(node.worlds) for node in nodes]
    for node in nodes:
        node.join()
    turning.until(lambda: all(len(node.worlds) > number for node, number in zip(nodes, before, strict=True)))


@pytest.mark.parametrize("addr", ["127.0.0.1", "::1"])
def test_a_world_and_its_end(turning: Any, node: Callable[..., Any], addr: str) -> None:
    if addr == "::1" and not has_ipv6():
        pytest.skip("no IPv6 in this kernel")
    leader, follower = node("host0", addr=addr), node("host1", addr=addr)
    started(turning, follower, leader)

    first, second = leader.worlds[0], follower.worlds[0]
    assert (first.node_rank, first.first_rank, first.world_size, first.nnodes) == (0, 0, 4, 2)
    assert (second.node_rank, second.first_rank) == (1, 2)
    assert (first.master_addr, first.master_port) == (second.master_addr, second.master_port)
    assert first.master_addr == addr
    assert first.store_fd is not None
    assert second.store_fd is None
    assert (first.job, first.generation) == (second.job, 1)
    assert first.job

    leader.rendezvous.succeeded()
    turning.for_s(0.2)
    assert leader.done == follower.done == 0
    follower.rendezvous.succeeded()
    turning.until(lambda: follower.done and leader.done)
    assert (leader.done, follower.done) == (1, 1)


AGES = {
    "old": Offer(key="old", generation=1, step=30),
    "new": Offer(key="new", generation=2, step=20),
}


@pytest.mark.parametrize(
    ("offered", "shared", "replicated"),
    [
        ((("new", "old"), ("old",)), "old", "new"),
        ((("old",), ("new", "old")), "old", "new"),
        ((("old",), ()), "", "old"),
        (((), ("new",)), "", "new"),
        (((), ()), "", ""),
    ],
)
def test_the_checkpoint_is_one_that_all_can_read_or_with_copies_the_newest_that_any_can(
    turning: Any,
    node: Callable[..., Any],
    offered: tuple[tuple[str, ...], tuple[str, ...]],
    shared: str,
    replicated: str,
) -> None:
    for replicate, expected in ((False, shared), (True, replicated)):
        settings = replace(SETTINGS, replicate=replicate)
        nodes = [node("host0", settings), node("host1", settings)]
        for each, keys in zip(nodes, offered, strict=True):
            each.rendezvous.join(0, [AGES[key] for key in keys])
        turning.until(lambda nodes=nodes: all(each.worlds for each in nodes))

        assert [each.worlds[0].resume for each in nodes] == [expected] * 2
        for each in nodes:
            each.rendezvous.close()


def test_the_nodes_tell_each_other_whether_any_rank_works(turning: Any, node: Callable[..., Any]) -> None:
    nodes = [node("host0"), node("host1")]
    started(turning, *nodes)
    leader, follower = (each.rendezvous for each in nodes)

    def all_idle() -> bool:
        return leader.others_idle_s() is not None and follower.others_idle_s() is not None

    assert leader.others_idle_s() is follower.others_idle_s() is None, "at first it is unknown"
    leader.idle(True)
    turning.for_s(0.2)
    assert leader.others_idle_s() is follower.others_idle_s() is None, "the ranks of one may work"
    follower.idle(True)
    turning.until(all_idle)
    turning.for_s(0.3)
    assert follower.others_idle_s() >= 0.3
    leader.idle(False)
    turning.until(lambda: follower.others_idle_s() is None)
    leader.idle(True)
    turning.until(all_idle)
    assert follower.others_idle_s() < 0.3, "it counts from the last time"
    follower.idle(False)
    follower.succeeded()
    turning.until(all_idle)  # none of its ranks is left


def test_one_verdict_when_no_rank_is_alive_anywhere(turning: Any, node: Callable[..., Any]) -> None:
    leader, follower = node("host0"), node("host1")
    started(turning, leader, follower)

    follower.rendezvous.failed(OWN)
    turning.until(lambda: leader.peer_failed)
    assert leader.peer_failed == [(False, "node 1 (host1): rank 1 raised ValueError")]
    follower.rendezvous.judge(OWN)
    turning.for_s(0.2)
    assert leader.judged == follower.judged == []
    leader.rendezvous.judge(TOLD)
    turning.until(lambda: leader.judged and follower.judged)

    (decision, elsewhere) = leader.judged[0]
    assert (decision.again, elsewhere) == (True, "node 1 (host1): rank 1 raised ValueError")
    (decision, elsewhere) = follower.judged[0]
    assert (decision.again, elsewhere) == (True, "")
    started(turning, leader, follower)
    assert [world.attempt for world in leader.worlds] == [0, 1]

    leader.rendezvous.failed(OWN)
    turning.until(lambda: follower.peer_failed)
    leader.rendezvous.judge(OWN)
    follower.rendezvous.judge(TOLD)
    turning.until(lambda: len(leader.judged) == len(follower.judged) == 2)
    for each in (leader, follower):
        assert (each.judged[1][0].again, each.judged[1][0].code) == (False, 3)
        assert each.judged[1][0].why == "all 1 restarts allowed by --max-restarts are used"


def test_the_others_go_on_without_a_node_that_has_left(turning: Any, node: Callable[..., Any]) -> None:
    settings = replace(SETTINGS, min_nodes=1, silent_s=0.5)
    leader, follower = node("host0", settings), node("host1", settings)
    started(turning, leader, follower)
    follower.rendezvous.close()
    turning.until(lambda: leader.peer_failed)
    leader.rendezvous.judge(TOLD)
    turning.until(lambda: leader.judged)
    assert leader.judged[0][0].again
    started(turning, leader)
    assert (leader.worlds[1].nnodes, leader.worlds[1].generation) == (1, 2)


def test_a_node_that_leaves_says_so_and_is_not_waited_for(turning: Any, node: Callable[..., Any]) -> None:
    settings = replace(SETTINGS, min_nodes=1)
    leader, follower = node("host0", settings), node("host1", settings)
    started(turning, leader, follower)

    follower.rendezvous.failed(Cause(text="asked to end by SIGTERM", tier=Tier.OWN, final=True, leaves=True))
    follower.rendezvous.close()
    turning.until(lambda: leader.peer_failed)
    assert leader.peer_failed == [(False, "node 1 (host1): asked to end by SIGTERM")]
    leader.rendezvous.judge(TOLD)
    turning.until(lambda: leader.judged)
    started(turning, leader)
    assert leader.worlds[1].world_size == 2


def test_who_comes_after_the_end_waits_for_the_next_job(turning: Any, node: Callable[..., Any]) -> None:
    """`gpulaunch a.py; gpulaunch b.py` on each node: the first one's leader leaves last."""
    settings = replace(SETTINGS, min_nodes=3, max_nodes=3)
    own = type(turning)()  # of a node that is slow to hear of the end
    leader, first, slow = node("host0", settings), node("host1", settings), node("host2", settings, on=own)
    for each in (leader, first, slow):
        each.join()
    turning.until(lambda: own.loop.turn(0.01) or (leader.worlds and first.worlds and slow.worlds))
    for each in (leader, first, slow):
        each.rendezvous.succeeded()
    own.for_s(0.2)
    turning.until(lambda: first.done)

    early = node("host1", settings)
    early.join()
    turning.for_s(0.5)
    assert (early.done, early.failed, early.worlds, leader.done) == (0, [], [], 0)
    own.until(lambda: slow.done)
    own.close()
    turning.until(lambda: leader.done)
    again = node("host0", settings), node("host2", settings)
    for each in again:
        each.join()
    turning.until(lambda: early.worlds)

    assert (early.worlds[0].generation, early.worlds[0].nnodes) == (1, 3)


def test_node_ranks_follow_the_given_numbers(turning: Any, node: Callable[..., Any]) -> None:
    leader, follower = node("host0", order=1), node("host1", order=0)
    started(turning, leader, follower)

    assert (leader.worlds[0].node_rank, follower.worlds[0].node_rank) == (1, 0)
    assert follower.worlds[0].store_fd is not None
    assert leader.worlds[0].master_port == follower.worlds[0].master_port


def test_nobody_comes(turning: Any, node: Callable[..., Any]) -> None:
    leader = node("host0", replace(SETTINGS, join_timeout_s=0.3))
    leader.join()
    turning.until(lambda: leader.over)

    assert leader.over == [(75, "waited 0.3 s for 2 nodes: 1 is there")]


def test_a_spare_hears_of_the_end_and_has_the_same_exit_code(turning: Any, node: Callable[..., Any]) -> None:
    leader, follower, spare = node("host0"), node("host1"), node("host2")
    started(turning, leader, follower)
    spare.join()
    turning.for_s(0.2)
    for each in (leader, follower):
        each.rendezvous.succeeded()
    turning.until(lambda: leader.done and follower.done and spare.done)
    assert spare.worlds == []


def test_a_spare_keeps_nobody_from_a_seat(turning: Any, node: Callable[..., Any]) -> None:
    """It has been ready for long; the others look for checkpoints first."""
    settings = replace(SETTINGS, last_call_s=5.0)
    leader, follower, spare = node("host1", settings), node("host2", settings), node("host0", settings)
    started(turning, leader, follower)
    spare.join()
    turning.for_s(0.2)
    follower.rendezvous.failed(OWN)
    turning.until(lambda: leader.peer_failed)
    follower.rendezvous.judge(OWN)
    leader.rendezvous.judge(TOLD)
    turning.until(lambda: leader.judged and follower.judged)
    leader.join(1)
    turning.for_s(0.3)
    started(turning, follower)
    turning.until(lambda: len(leader.worlds) == 2)

    assert [each.worlds[1].node_rank for each in (leader, follower)] == [0, 1]
    assert spare.worlds == []


def test_the_leader_that_leaves_ends_the_job_on_all_nodes(turning: Any, node: Callable[..., Any]) -> None:
    leader, follower = node("host0"), node("host1")
    started(turning, leader, follower)
    asked = Cause(text="told to end by SIGINT", tier=Tier.OWN, final=True, leaves=True, exit_code=130)
    leader.rendezvous.failed(asked)
    assert not leader.rendezvous.leave()
    turning.until(lambda: follower.peer_failed)
    follower.rendezvous.judge(TOLD)
    turning.until(lambda: follower.judged)
    assert (follower.judged[0][0].again, follower.judged[0][0].code) == (False, 130)
    turning.until(leader.rendezvous.leave)


@pytest.mark.parametrize(("host", "most"), [("host0", 50), ("host2", 0)])
def test_a_leader_that_starts_anew_asks_only_its_own_host_for_the_one_before(
    turning: Any, node: Callable[..., Any], host: str, most: int
) -> None:
    """And as often as there can be leaders before it: each is a connection to an address that a report names."""
    leader = node("host0")
    leader.join()
    client = turning.client(leader.rendezvous.port)
    client.sendall(encode(Register(run_id="j", min_nodes=2, max_nodes=2, max_restarts=1)))
    with socket.create_server(("127.0.0.1", 0), backlog=128) as agent:
        agent.setblocking(False)
        for at in range(60):
            seat = Seat(node=f"before{at}", host=host, node_rank=0, nproc=1, first_rank=0)
            plan = Plan(generation=1, keeper=Keeper(seat=seat, address="127.0.0.1", agent_port=agent.getsockname()[1]))
            trains = Report(node="node1", host="host1", nproc=1, state=NodeState.RUNNING, generation=1, plan=plan)
            client.sendall(encode(Reported(report=trains)))
        asked = 0
        turning.for_s(0.5)
        with contextlib.suppress(BlockingIOError):
            while True:
                agent.accept()[0].close()
                asked += 1

    assert asked == most
