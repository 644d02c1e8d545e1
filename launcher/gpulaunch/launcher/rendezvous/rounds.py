"""The decisions of leader and members, without sockets and clocks: messages received in, messages to send out.

The leader (on node 0) keeps a `NodeGroup`. It gathers the nodes once; then every attempt has the same three steps:

    GATHERING  nodes arrive, and may leave again
    READYING   no rank runs; waiting until the ranks of the last attempt are dead on every node
    RUNNING    all were told to start
    LEAVING    all ended successfully and were told; the leader stays until the others have left
    OVER       given up, or done

Every node, also node 0, keeps a `Member`: what it has sent and received in its present attempt. It decides which
messages matter to its agent, since they can cross: two nodes may report the end of one attempt at the same time.

So no rank of attempt k can reach the store of attempt k - 1: `go k` is sent only after `ready k` came from all nodes,
and a node sends `ready k` when its ranks are dead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from gpulaunch.launcher.rendezvous.messages import Done, Ended, Failed, Go, Hello, Message, Ready, clean

LEADER = 0


class Stage(Enum):
    """The state of the group; see the module's docstring."""

    GATHERING = "gathering"
    READYING = "readying"
    RUNNING = "running"
    LEAVING = "leaving"
    OVER = "over"


@dataclass(frozen=True, kw_only=True)
class Node:
    """The data of one node."""

    nproc: int
    host: str


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Everything that the leader's decisions depend on."""

    run_id: str
    nnodes: int
    nodes: Mapping[int, Node]
    """By node rank; the leader is always included."""
    stage: Stage = Stage.GATHERING
    attempt: int = 0
    """The attempt that runs, or that is being prepared."""
    ready: frozenset[int] = frozenset()
    offers: Mapping[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    """By node rank: the checkpoints that a ready node can read, the best first."""
    ok: frozenset[int] = frozenset()

    @property
    def missing(self) -> list[int]:
        """Node ranks that have not joined yet."""
        return [rank for rank in range(self.nnodes) if rank not in self.nodes]

    def name(self, rank: int) -> str:
        """The name of a node for users."""
        return f"node {rank} ({self.nodes[rank].host})"


Sends = tuple[tuple[int, Message], ...]
"""Messages, each with the node rank to send it to."""
Result = tuple[NodeGroup, Sends]


def gather(*, run_id: str, nnodes: int, leader: Node) -> NodeGroup:
    """The initial group: only the leader."""
    return _complete(NodeGroup(run_id=clean(run_id), nnodes=nnodes, nodes={LEADER: leader}))


def refusal(group: NodeGroup, hello: Hello) -> str | None:
    """Why this node cannot take part, as one line for both sides; None if it can."""
    who = f"node {hello.node_rank} ({hello.host})"
    if hello.run_id != group.run_id:
        return f"{who} belongs to run {hello.run_id!r}, node 0 to {group.run_id!r}; check --rdzv-id and --master-port"
    if hello.nnodes != group.nnodes:
        return f"{who} was started with --nnodes {hello.nnodes}, node 0 with {group.nnodes}; use the same on all nodes"
    if hello.node_rank >= group.nnodes:
        return f"{who} has no place in --nnodes {group.nnodes}; --node-rank counts from 0 to {group.nnodes - 1}"
    if hello.node_rank in group.nodes:
        return f"--node-rank {hello.node_rank} given twice: on {group.nodes[hello.node_rank].host} and {hello.host}"
    if hello.nproc < 1:
        return f"{who} has no ranks; check --nproc-per-node"
    return None


def arrive(group: NodeGroup, rank: int, node: Node) -> Result:
    """Add a node that was not refused."""
    return _go_if_ready(_complete(replace(group, nodes={**group.nodes, rank: node})))


def hear(group: NodeGroup, rank: int, message: Message) -> Result:
    """Handle a member's message."""
    if group.stage in (Stage.LEAVING, Stage.OVER):
        return group, ()
    if isinstance(message, Ready):
        return _ready(group, rank, message)
    if isinstance(message, Ended):
        return _ended(group, rank, message)
    return _over(group, rank, f"{group.name(rank)} said what only a leader says")


def gone(group: NodeGroup, rank: int, why: str) -> Result:
    """The connection to a member has ended."""
    rest = replace(group, nodes={r: node for r, node in group.nodes.items() if r != rank}, ready=group.ready - {rank})
    if group.stage in (Stage.GATHERING, Stage.OVER):
        return rest, ()
    if group.stage is Stage.LEAVING:
        return (rest, ()) if len(rest.nodes) > 1 else leave(rest)
    return _over(rest, rank, f"{group.name(rank)} is gone: {why}", lost=True)


def leave(group: NodeGroup) -> Result:
    """The others have left, or the wait for them is over: the leader may leave too."""
    if group.stage is not Stage.LEAVING:
        return group, ()
    return replace(group, stage=Stage.OVER), ((LEADER, Done(attempt=group.attempt)),)


def _complete(group: NodeGroup) -> NodeGroup:
    return group if group.missing else replace(group, stage=Stage.READYING)


def _ready(group: NodeGroup, rank: int, message: Ready) -> Result:
    if group.stage is Stage.RUNNING or message.attempt != group.attempt:
        return _over(
            group, rank, f"{group.name(rank)} is ready for attempt {message.attempt} during attempt {group.attempt}"
        )
    offers = {**group.offers, rank: _offers_of(message.offers)}
    return _go_if_ready(replace(group, ready=group.ready | {rank}, offers=offers))


def agreed(group: NodeGroup) -> str:
    """The checkpoint that all resume from: of those that every node can read, the leader's best."""
    every = [set(group.offers.get(rank, ())) for rank in range(group.nnodes)]
    return next((key for key in group.offers.get(LEADER, ()) if all(key in offered for offered in every)), "")


def _offers_of(text: str) -> tuple[str, ...]:
    return tuple(key for key in text.split("|")[:-1] if key)


def _offers_text(offers: Sequence[str]) -> str:
    """As many offers as fit into a message; one that is cut off has no bar at its end, and does not count."""
    return "".join(f"{key}|" for key in offers if "|" not in key and key.isprintable())


def _go_if_ready(group: NodeGroup) -> Result:
    if group.stage is not Stage.READYING or len(group.ready) < group.nnodes:
        return group, ()
    world_size = sum(node.nproc for node in group.nodes.values())
    resume = agreed(group)
    first_rank = 0
    sends: list[tuple[int, Message]] = []
    for rank in range(group.nnodes):
        sends.append((rank, Go(attempt=group.attempt, first_rank=first_rank, world_size=world_size, resume=resume)))
        first_rank += group.nodes[rank].nproc
    return replace(group, stage=Stage.RUNNING, ok=frozenset(), offers={}), tuple(sends)


def _ended(group: NodeGroup, rank: int, message: Ended) -> Result:
    if not message.ok and message.final:
        return _over(group, rank, f"{group.name(rank)}: {message.why}", preempted=message.preempted)
    if group.stage is not Stage.RUNNING or message.attempt != group.attempt:
        return group, ()  # this attempt is known to have failed: another node reported first
    if message.ok:
        return _leave_if_ok(replace(group, ok=group.ok | {rank}))
    failed = Failed(attempt=group.attempt, final=False, why=f"{group.name(rank)}: {message.why}")
    following = replace(group, stage=Stage.READYING, attempt=group.attempt + 1, ready=frozenset())
    return following, _to_others(group, rank, failed)


def _leave_if_ok(group: NodeGroup) -> Result:
    if len(group.ok) < group.nnodes:
        return group, ()
    leaving = replace(group, stage=Stage.LEAVING)
    if group.nnodes == 1:
        return leave(leaving)
    return leaving, _to_others(group, LEADER, Done(attempt=group.attempt))


def _over(group: NodeGroup, rank: int, why: str, *, preempted: bool = False, lost: bool = False) -> Result:
    failed = Failed(attempt=group.attempt, final=True, why=why, preempted=preempted, lost=lost)
    return replace(group, stage=Stage.OVER), _to_others(group, rank, failed)


def _to_others(group: NodeGroup, rank: int, message: Message) -> Sends:
    return tuple((other, message) for other in sorted(group.nodes) if other != rank)


# -- one node


class MemberPhase(Enum):
    """The state of a node in its attempt."""

    IDLE = "idle"
    JOINING = "joining"
    RUNNING = "running"
    WAITING = "waiting"
    """Ended well here."""
    FAILED = "failed"
    """Failed here or elsewhere; the node has not joined the next attempt yet."""
    OVER = "over"


@dataclass(frozen=True, kw_only=True)
class Member:
    """What one node has sent and received."""

    phase: MemberPhase = MemberPhase.IDLE
    attempt: int = 0


def join(member: Member, attempt: int, offers: Sequence[str] = ()) -> tuple[Member, Ready | None]:
    """The agent joins, with the checkpoints that it can read; return the message for the leader."""
    if member.phase is MemberPhase.OVER:
        return member, None
    return Member(phase=MemberPhase.JOINING, attempt=attempt), Ready(attempt=attempt, offers=_offers_text(offers))


def tell(member: Member, *, ok: bool, final: bool, why: str, preempted: bool = False) -> tuple[Member, Ended | None]:
    """The agent reports the result of this node; return the message for the leader."""
    if member.phase in (MemberPhase.IDLE, MemberPhase.OVER) or (ok and member.phase is not MemberPhase.RUNNING):
        return member, None
    phase = MemberPhase.WAITING if ok else MemberPhase.OVER if final else MemberPhase.FAILED
    return replace(member, phase=phase), Ended(attempt=member.attempt, ok=ok, final=final, why=why, preempted=preempted)


def receive(member: Member, message: Message) -> tuple[Member, bool]:
    """Handle a message of the leader; return whether it is new to the agent."""
    if isinstance(message, Go):
        relevant = member.phase is MemberPhase.JOINING and message.attempt == member.attempt
        phase = MemberPhase.RUNNING
    elif isinstance(message, Failed) and message.final:
        relevant = member.phase is not MemberPhase.OVER
        phase = MemberPhase.OVER
    elif isinstance(message, Failed):
        relevant = member.phase in (MemberPhase.RUNNING, MemberPhase.WAITING) and message.attempt == member.attempt
        phase = MemberPhase.FAILED
    elif isinstance(message, Done):
        relevant = member.phase is MemberPhase.WAITING and message.attempt == member.attempt
        phase = MemberPhase.OVER
    else:
        relevant, phase = False, member.phase
    return (replace(member, phase=phase), True) if relevant else (member, False)
