"""Histories of failures, losses, cuts, returns and new leaders, by the hundred: what holds in all of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from simulation import LIMITS, TICK_S, World, settings

from gpulaunch.launcher.failure.causes import Cause, Tier
from gpulaunch.launcher.failure.classify import Kind
from gpulaunch.launcher.policy import restart
from gpulaunch.launcher.policy.restart import RestartHistory
from gpulaunch.launcher.rendezvous import decide, member, membership
from gpulaunch.launcher.rendezvous.plan import Keeper, NodeState, Plan, Report, Seat, Stage

SEEDS = range(150)
FAULTS_S = 80.0


def history(seed: int) -> World:
    """A job with faults, which then stop. In every third the plan outlives whoever decides; else it is lost."""
    chance = random.Random(seed)
    most = chance.randint(2, 6)
    hosts = [f"host{number}" for number in range(most + seed % 3)]  # with up to two spares
    world = World(seed, settings(chance.randint(1, most), most), hosts)
    while world.now_s < FAULTS_S:
        world.step()
        world.check()
        fault(chance, world, hosts, seed)
    world.cut.clear()
    world.deaf.clear()
    world.lossy = 0.0
    return world


def fault(chance: random.Random, world: World, hosts: list[str], seed: int) -> None:
    """Now and then, one of them."""
    alive = sorted(world.nodes)
    match chance.randrange(1000):
        case 0 | 1:
            world.fail(chance.choice(alive))
        case 2 if len(alive) > 1:
            world.kill(chance.choice(alive))
        case 3 if len(alive) < len(hosts):
            world.start(chance.choice([host for host in hosts if host not in world.nodes]))
        case 4:
            world.cut.add(chance.choice(hosts))
        case 5 | 6:
            world.cut.clear()
        case 7:
            world.deaf.add(chance.choice(hosts))
        case 8:
            world.deaf.clear()
        case 9:
            if seed % 3 == 0:
                world.change_decider()
            else:
                world.restart_leader()
        case 10:
            world.lossy = chance.choice([0.0, 0.2, 0.5])


@pytest.mark.parametrize("seed", SEEDS)
def test_one_generation_at_a_time_and_all_nodes_train_once_faults_stop(seed: int) -> None:
    world = history(seed)
    hosts = world.rules.max_nodes + seed % 3
    if len(world.nodes) < world.rules.min_nodes or seed % 2:
        for number in range(hosts):
            if f"host{number}" not in world.nodes:
                world.start(f"host{number}")
    expected = min(len(world.nodes), world.rules.max_nodes)

    def trains() -> bool:
        world.check()
        return world.trains_with(expected)

    world.run(trains)


def test_a_fence_that_comes_too_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation would show two generations at once."""
    monkeypatch.setattr(member, "FENCE_S", 20.0)
    world = World(1, settings(2, 3), ["host0", "host1", "host2"])
    world.run(lambda: world.trains_with(3))
    world.cut.add("host2")

    with pytest.raises(AssertionError, match="two generations train"):
        world.run(lambda: world.check())


@pytest.mark.parametrize("blind", ["cut", "deaf"])
def test_a_silent_node_is_replaced_by_going_on_without_it(blind: str) -> None:
    world = World(1, settings(2, 3), ["host0", "host1", "host2"])
    world.run(lambda: world.trains_with(3))
    getattr(world, blind).add("host2")

    took_s = world.run(lambda: world.check() or world.trains_with(2))

    if blind == "cut":
        assert world.rules.silent_s <= took_s <= world.rules.silent_s + 4.0
    assert world.plan.attempt == 1
    getattr(world, blind).clear()
    assert world.run(lambda: world.check() or world.trains_with(3)) <= 8.0


def test_a_flap_of_five_seconds_changes_nothing() -> None:
    world = World(1, settings(2, 3), ["host0", "host1", "host2"])
    world.run(lambda: world.trains_with(3))
    world.cut.add("host2")
    until_s = world.now_s + 5.0
    world.run(lambda: world.now_s >= until_s)
    world.cut.clear()
    until_s = world.now_s + 20.0
    world.run(lambda: world.check() or world.now_s >= until_s)

    assert (world.plan.generation, world.trains_with(3)) == (1, True)


def test_a_new_decider_gives_every_node_the_time_to_be_heard() -> None:
    """Also one whose report is gone: it may train, and only its own clock tells it when to end that."""
    world = World(1, settings(2, 3), ["host0", "host1", "host2"])
    world.run(lambda: world.trains_with(3))
    world.cut.add("host2")
    until_s = world.now_s + 6.0
    world.run(lambda: world.now_s >= until_s)
    world.members.clear()
    world.change_decider()
    changed_s = world.now_s

    world.run(lambda: world.check() or world.trains_with(2))

    assert world.now_s - changed_s >= world.rules.silent_s


@pytest.mark.parametrize(("after_s", "again"), [(30.0, False), (90.0, True)])
def test_restarts_of_before_count_by_the_clock_of_who_decides_now(after_s: float, again: bool) -> None:
    """The clocks of two hosts differ by their times since boot."""
    limits = replace(LIMITS, rate=(1, 60.0))
    cause = Cause(text="ValueError", tier=Tier.OWN, kind=Kind.EXCEPTION)
    history, _ = restart.decide(limits, RestartHistory(), restart.failure_of(cause, at_s=1000.0))
    plan = decide.shifted(Plan(since_s=1000.0, history=history), -990.0)
    assert plan.since_s == 10.0

    _, decision = restart.decide(limits, plan.history, restart.failure_of(cause, at_s=10.0 + after_s))

    assert decision.again is again


def test_survivors_keep_their_ranks_and_a_newcomer_takes_the_free_one() -> None:
    hosts = ["host2", "host10", "host1", "host3"]
    world = World(1, settings(2, 4), hosts)
    world.run(lambda: world.trains_with(4))
    assert [seat.host for seat in world.plan.seats] == ["host1", "host2", "host3", "host10"]

    world.kill("host2")
    world.run(lambda: world.trains_with(3))
    assert [seat.host for seat in world.plan.seats] == ["host1", "host10", "host3"]

    world.start("host0")
    world.run(lambda: world.trains_with(4))
    assert [seat.host for seat in world.plan.seats] == ["host1", "host10", "host3", "host0"]


def test_one_budget_for_all_nodes() -> None:
    """A crash loop that moves from node to node."""
    rules = settings(3, 3, limits=replace(LIMITS, max_restarts=2))
    world = World(1, rules, ["host0", "host1", "host2"])
    for number in range(3):
        world.run(lambda: world.trains_with(3))
        world.fail(f"host{number}")
    world.run(lambda: all(node.over is not None for node in world.nodes.values()))

    assert (world.plan.stage, world.plan.attempt, world.plan.exit_code) == (Stage.OVER, 2, 1)
    for node in world.nodes.values():
        assert node.over is not None
        assert node.over.why == "node 2 (host2): ValueError"
        assert node.over.exit_code == 1


def test_a_lost_node_costs_no_restart_of_the_budget() -> None:
    world = World(1, settings(1, 3, limits=replace(LIMITS, max_restarts=0)), ["host0", "host1", "host2"])
    for nodes in (3, 2, 1):
        world.run(lambda nodes=nodes: world.trains_with(nodes))  # type: ignore[misc]
        world.kill(f"host{nodes - 1}")
        if nodes > 1:
            world.run(lambda nodes=nodes: world.trains_with(nodes - 1))  # type: ignore[misc]

    assert world.plan.history.restarts == 0


def test_the_own_failure_is_the_cause_and_not_the_first_echo() -> None:
    world = World(1, settings(3, 3, limits=replace(LIMITS, max_restarts=0)), ["host0", "host1", "host2"])
    world.run(lambda: world.trains_with(3))
    world.fail("host1", Kind.SEGFAULT)
    world.run(lambda: all(node.over is not None for node in world.nodes.values()))

    assert {node.over.why for node in world.nodes.values() if node.over} == {"node 1 (host1): ValueError"}


@pytest.mark.parametrize("seed", range(40))
def test_a_fixed_group_goes_on_until_a_node_is_lost(seed: int) -> None:
    chance = random.Random(seed)
    hosts = [f"host{number}" for number in range(chance.randint(2, 4))]
    world = World(seed, settings(len(hosts), len(hosts), fixed=True), hosts)
    heals_s = 0.0
    while world.now_s < FAULTS_S:
        world.step()
        world.check()
        if world.now_s >= heals_s:
            world.cut.clear()
        match chance.randrange(100):
            case 0:
                world.fail(chance.choice(hosts))
            case 1 if world.now_s > heals_s + 3.0:
                world.cut.add(chance.choice(hosts))
                heals_s = world.now_s + 4.5
            case 2:
                world.lossy = chance.choice([0.0, 0.2])
    world.cut.clear()
    world.run(lambda: world.check() or world.trains_with(len(hosts)))
    generation = world.plan.generation

    (world.kill if seed % 2 else world.cut.add)(hosts[-1])
    world.run(lambda: world.check() or all(world.nodes[host].over for host in hosts[:-1]), within_s=15.0)

    assert (world.plan.generation, world.plan.exit_code, world.plan.lost) == (generation, 75, True)
    assert f"({hosts[-1]}) is lost" in world.plan.why


@pytest.mark.parametrize("nodes", [256, 1024, 4096])
def test_a_large_group_forms_in_linear_time(nodes: int) -> None:
    """Each tick decides once: what it costs grows with the nodes, and no faster."""
    world = World(1, settings(nodes, nodes), [f"host{number}" for number in range(nodes)])

    took_s = world.run(lambda: world.trains_with(nodes))

    assert took_s <= 10 * TICK_S + 1.0
    assert world.plan.world_size == 2 * nodes


def test_a_leader_before_is_lost_once_its_host_has_said_that_it_is_dead_and_else_when_it_has_been_silent() -> None:
    """The plan of the one that has started anew is made of what the others have been sent: their own seats."""
    two = settings(2, 3)
    seats = [Seat(node=f"node{at}", host=f"host{at}", node_rank=at, nproc=1, first_rank=at) for at in range(2)]
    keeper = Keeper(seat=seats[0], address="10.0.0.1", agent_port=7)
    known = Plan(job="job", stage=Stage.RUNNING, generation=4, seats=(seats[1],), nnodes=2, keeper=keeper)
    trains = {"nproc": 1, "state": NodeState.RUNNING, "generation": 4, "newest": 4, "job": "job", "plan": known}
    members = {
        "node1": membership.heard(None, Report(node="node1", host="host1", **trains), 100.0),
        "new": membership.heard(None, Report(node="new", host="host0", nproc=1), 100.0),
    }
    waits = decide.decide(two, Plan(), members, 100.0)
    dead = {**members, "node0": replace(membership.unheard(seats[0], waits, 101.0), gone=True)}

    assert (waits.stage, waits.seats[0].node) == (Stage.RUNNING, "")
    assert decide.decide(two, waits, members, 108.0).stage is Stage.RUNNING
    assert decide.decide(two, waits, members, 110.0).stage is Stage.STOPPING
    stops = decide.decide(two, waits, dead, 101.0)
    assert (stops.stage, stops.lost, stops.why.partition(";")[0]) == (Stage.STOPPING, True, "node 0 (host0) is lost")
