"""Nodes and a leader that exist in one loop, over a network that loses, delays and cuts, on a clock of its own.

Everything that decides is the real thing (`decide`, `member`); what is made up is time, the network and the ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpulaunch.launcher.failure.causes import Cause, Tier
from gpulaunch.launcher.failure.classify import Kind
from gpulaunch.launcher.policy.restart import Limits
from gpulaunch.launcher.rendezvous import decide, member, membership
from gpulaunch.launcher.rendezvous.member import News
from gpulaunch.launcher.rendezvous.plan import Member, Plan, Report, Settings, Stage

TICK_S = 0.25
LIMITS = Limits(max_restarts=1000, rate=None, backoff_max_s=4.0, no_progress=0)
ENDING_S = 1.0
"""How long ranks take to end after they were told to."""


def settings(least: int, most: int, **given: object) -> Settings:
    """Of a job whose restarts are not limited by anything else."""
    return replace(Settings(min_nodes=least, max_nodes=most, limits=LIMITS, last_call_s=3.0), **given)  # type: ignore[arg-type]


@dataclass
class Node:
    """An agent, its ranks, and what it knows."""

    report: Report
    trains: int | None = None
    """The generation whose ranks are alive here."""
    ends_s: float | None = None
    """When ranks that were told to end will have."""
    ready_s: float | None = 0.0
    """When it will have looked for checkpoints."""
    acknowledged_s: float = 0.0
    """When the newest report that is known to have arrived was sent."""
    cause: Cause | None = None
    done: bool = False
    over: Plan | None = None


class World:
    """All of it; `step` lets a tick pass."""

    def __init__(self, seed: int, rules: Settings, hosts: list[str]) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.now_s = 0.0
        self.plan = Plan()
        self.members: dict[str, Member] = {}
        self.nodes: dict[str, Node] = {}
        self.cut: set[str] = set()
        """Hosts that reach no other."""
        self.deaf: set[str] = set()
        """Hosts that hear no other, but are heard."""
        self.lossy = 0.0
        self._made = 0
        self._flying: list[tuple[float, Callable[[], None]]] = []
        for host in hosts:
            self.start(host)

    # -- what happens from outside

    def start(self, host: str) -> Node:
        """An agent starts on a host; any earlier one there is dead."""
        self._made += 1
        order = int(host.removeprefix("host")) if self.rules.fixed else None
        report = Report(node=f"{host}-{self._made}", host=host, address=host, order=order, nproc=2)
        node = self.nodes[host] = Node(report=report, acknowledged_s=self.now_s)
        node.ready_s = self.now_s + self.random.uniform(0, 1)
        return node

    def kill(self, host: str) -> None:
        """Power off: nothing of it is left, and no message is sent."""
        del self.nodes[host]

    def fail(self, host: str, kind: Kind = Kind.EXCEPTION) -> None:
        """A rank fails, and the peers lose it."""
        generation = self.nodes[host].trains
        if generation is None or self.nodes[host].ends_s is not None:
            return
        self._end(self.nodes[host], Cause(text="ValueError", tier=Tier.OWN, kind=kind))
        for node in self.nodes.values():
            if node.trains == generation and node.ends_s is None:
                self._end(node, Cause(text="connection closed by peer", tier=Tier.ECHO, kind=Kind.PEER))

    def restart_leader(self) -> None:
        """The leader's memory is gone."""
        self.plan, self.members = Plan(since_s=self.now_s), {}

    def change_decider(self) -> None:
        """Another node decides: with the plan, and most of the reports, but not since when each node is silent."""
        self.members = {
            node: replace(known, heard_s=self.now_s, state_s=self.now_s)
            for node, known in self.members.items()
            if self.random.random() < 0.8
        }
        for seat in self.plan.seats:
            if seat.node not in self.members:
                self.members[seat.node] = membership.unheard(seat, self.plan, self.now_s)

    # -- time

    def step(self) -> None:
        """Let a tick pass."""
        self.now_s += TICK_S
        flying, self._flying = self._flying, []
        for at_s, arrive in flying:
            if at_s <= self.now_s:
                arrive()
            else:
                self._flying.append((at_s, arrive))
        for node in list(self.nodes.values()):
            self._live(node)
        self.plan = decide.decide(self.rules, self.plan, self.members, self.now_s)

    def run(self, until: Callable[[], object], within_s: float = 60.0) -> float:
        """Let time pass until something holds; how long that took."""
        began_s = self.now_s
        while not until():
            assert self.now_s < began_s + within_s, self.describe()
            self.step()
        return self.now_s - began_s

    def _live(self, node: Node) -> None:
        if node.ends_s is not None and self.now_s >= node.ends_s:
            node.trains = node.ends_s = None
            node.report = member.ended(node.report, node.cause or Cause(text="", tier=Tier.NONE))
            node.cause = None
        if node.ready_s is not None and self.now_s >= node.ready_s:
            node.ready_s = None
            node.report = member.ready(node.report, (), 29500)
        if node.trains is not None and self.now_s - node.acknowledged_s > member.FENCE_S:
            node.trains = node.ends_s = None
            node.report = member.ended(node.report, Cause(text="reached nobody", tier=Tier.NONE, kind=None))
        report, sent_s = node.report, self.now_s
        if self._passes(report.host, out=True):
            self._fly(lambda: self._arrive(report, sent_s))

    def _arrive(self, report: Report, sent_s: float) -> None:
        self.members[report.node] = membership.heard(self.members.get(report.node), report, self.now_s)
        plan = self.plan.for_node(report.node)
        if self._passes(report.host, out=False):
            self._fly(lambda: self._answer(report, plan, sent_s))

    def _answer(self, report: Report, plan: Plan, sent_s: float) -> None:
        node = self.nodes.get(report.host)
        if node is None or node.report.node != report.node:
            return
        node.acknowledged_s = max(node.acknowledged_s, sent_s)
        node.report, news = member.receive(node.report, plan)
        match news:
            case News.JOINED:
                node.trains = plan.generation
            case News.STOP:
                self._end(node, None)
            case News.JUDGED:
                if plan.stage is Stage.OVER:
                    node.over = plan
                else:
                    node.ready_s = self.now_s + self.random.uniform(0, 0.5)
            case News.DONE:
                node.done = True

    def _end(self, node: Node, cause: Cause | None) -> None:
        if node.ends_s is None:
            node.ends_s = self.now_s + self.random.uniform(0, ENDING_S)
            node.cause = cause
            if cause is not None:
                node.report = member.ending(node.report, cause)

    def _passes(self, host: str, *, out: bool) -> bool:
        return host not in self.cut and not (host in self.deaf and not out) and self.random.random() >= self.lossy

    def _fly(self, arrive: Callable[[], None]) -> None:
        self._flying.append((self.now_s + self.random.uniform(0, 0.3), arrive))

    # -- what is seen

    def trained(self) -> set[int]:
        """The generations of which a rank is alive."""
        return {node.trains for node in self.nodes.values() if node.trains is not None}

    def trains_with(self, hosts: int) -> bool:
        """Whether one generation runs on so many nodes, and the leader knows it."""
        running = [node for node in self.nodes.values() if node.trains is not None and node.ends_s is None]
        return (
            self.plan.stage is Stage.RUNNING
            and len(running) == len(self.plan.seats) == hosts
            and {node.trains for node in running} == {self.plan.generation}
        )

    def describe(self) -> str:
        """For a failed assertion."""
        lines = [f"{self.now_s:.2f} s: {self.plan}"]
        lines += [f"  {host}: trains {node.trains}, {node.report}" for host, node in self.nodes.items()]
        return "\n".join(lines)

    def check(self) -> None:
        """What must hold at any time."""
        assert len(self.trained()) <= 1, f"two generations train\n{self.describe()}"
        seats = [seat for seat in self.plan.seats if seat.node]
        assert len({seat.node for seat in seats}) == len(seats)
        assert [seat.node_rank for seat in self.plan.seats] == list(range(self.plan.nnodes))
        if len(seats) == self.plan.nnodes:
            sizes = [seat.nproc for seat in seats]
            assert [seat.first_rank for seat in seats] == [sum(sizes[:rank]) for rank in range(len(seats))]
            assert sum(sizes) == self.plan.world_size
