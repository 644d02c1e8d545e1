"""What leader and members decide, told as histories; and that no order of events loses a go or overlaps attempts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulaunch.launcher.rendezvous import rounds
from gpulaunch.launcher.rendezvous.messages import Done, Ended, Failed, Go, Hello, Ready, Welcome, decode, encode
from gpulaunch.launcher.rendezvous.rounds import Member, MemberPhase, Node, NodeGroup, Stage


def hello(rank: int = 1, **changes: Any) -> Hello:
    said = Hello(run_id="r", nnodes=3, node_rank=rank, nproc=2, host=f"host-{rank}", max_restarts=0)
    return replace(said, **changes)


def gathering(nnodes: int = 3) -> NodeGroup:
    return rounds.gather(run_id="r", nnodes=nnodes, leader=Node(nproc=1, host="host-0"))


def replay(group: NodeGroup, *events: tuple[Any, ...]) -> tuple[NodeGroup, list[tuple[int, Any]]]:
    """("come", rank, nproc), ("gone", rank), ("ready", rank, k), ("ok", rank, k), ("failed", rank, k, final)."""
    said: list[tuple[int, Any]] = []
    for event in events:
        word, rank = event[0], event[1]
        if word == "come":
            group, sends = rounds.arrive(group, rank, Node(nproc=event[2], host=f"host-{rank}"))
        elif word == "gone":
            group, sends = rounds.gone(group, rank, "connection closed")
        elif word == "ready":
            group, sends = rounds.hear(group, rank, Ready(attempt=event[2]))
        elif word == "ok":
            group, sends = rounds.hear(group, rank, Ended(attempt=event[2], ok=True, final=False, why=""))
        else:
            ended = Ended(attempt=event[2], ok=False, final=event[3], why="rank 5 failed")
            group, sends = rounds.hear(group, rank, ended)
        said += sends
    return group, said


def running(nnodes: int = 3) -> NodeGroup:
    group, _ = replay(
        gathering(nnodes),
        *(("come", rank, 2) for rank in range(1, nnodes)),
        *(("ready", rank, 0) for rank in range(nnodes)),
    )
    assert group.stage is Stage.RUNNING
    return group


# -- histories


def test_ranks_are_counted_by_node_rank_whoever_came_first_and_however_many_it_has() -> None:
    _, said = replay(
        gathering(), ("ready", 0, 0), ("come", 2, 4), ("ready", 2, 0), ("come", 1, 2), ("ready", 1, 0)
    )  # fmt: skip

    assert said == [
        (0, Go(attempt=0, first_rank=0, world_size=7)),
        (1, Go(attempt=0, first_rank=1, world_size=7)),
        (2, Go(attempt=0, first_rank=3, world_size=7)),
    ]


def test_one_node_goes_alone_and_leaves_alone() -> None:
    group, said = replay(gathering(1), ("ready", 0, 0), ("ok", 0, 0))

    assert said == [(0, Go(attempt=0, first_rank=0, world_size=1)), (0, Done(attempt=0))]
    assert group.stage is Stage.OVER


def test_who_leaves_before_all_are_there_may_come_again() -> None:
    group, said = replay(
        gathering(), ("come", 1, 2), ("ready", 1, 0), ("gone", 1), ("come", 2, 2), ("ready", 2, 0), ("ready", 0, 0)
    )
    assert said == []
    assert group.missing == [1]

    group, said = replay(group, ("come", 1, 2))
    assert said == [], "it has not said that it is ready"
    group, said = replay(group, ("ready", 1, 0))
    assert [type(message) for _, message in said] == [Go, Go, Go]


def test_a_failure_is_told_to_all_others_and_the_next_attempt_waits_for_all() -> None:
    group, said = replay(running(), ("failed", 1, 0, False))
    why = "node 1 (host-1): rank 5 failed"
    assert said == [(0, Failed(attempt=0, final=False, why=why)), (2, Failed(attempt=0, final=False, why=why))]

    group, said = replay(group, ("ready", 1, 1), ("ready", 0, 1))
    assert said == [], "the ranks of node 2 are still alive"

    group, said = replay(group, ("ready", 2, 1))
    assert [message.attempt for _, message in said] == [1, 1, 1]


def test_two_failures_of_one_attempt_cost_one_attempt() -> None:
    group, said = replay(running(), ("failed", 1, 0, False), ("failed", 2, 0, False), ("failed", 0, 0, False))

    assert len(said) == 2
    assert group.attempt == 1


def test_a_good_end_that_crosses_a_failure_changes_nothing() -> None:
    group, said = replay(running(), ("failed", 1, 0, False), ("ok", 2, 0), ("ok", 0, 0))

    assert len(said) == 2
    assert group.stage is Stage.READYING


def test_a_final_failure_ends_the_job_also_when_it_comes_second() -> None:
    group, said = replay(running(), ("failed", 1, 0, False), ("ready", 1, 1), ("failed", 2, 0, True))

    assert [(rank, message.final) for rank, message in said] == [(0, False), (2, False), (0, True), (1, True)]
    assert group.stage is Stage.OVER
    assert replay(group, ("ready", 0, 1), ("gone", 1), ("failed", 0, 0, True))[1] == []


@pytest.mark.parametrize("before", [(), (("failed", 2, 0, False),), (("ok", 1, 0),)])
def test_a_node_that_is_gone_ends_the_job_for_all_others(before: tuple[Any, ...]) -> None:
    group, _ = replay(running(), *before)
    group, said = replay(group, ("gone", 1))

    why = "node 1 (host-1) is gone: connection closed"
    assert said == [(rank, Failed(attempt=group.attempt, final=True, why=why, lost=True)) for rank in (0, 2)]


def test_the_leader_leaves_last() -> None:
    group, said = replay(running(), ("ok", 0, 0), ("ok", 2, 0), ("ok", 1, 0))
    assert said == [(1, Done(attempt=0)), (2, Done(attempt=0))]

    group, said = replay(group, ("gone", 2))
    assert said == []
    group, said = replay(group, ("gone", 1))
    assert said == [(0, Done(attempt=0))]


def test_the_leader_does_not_wait_for_ever() -> None:
    group, _ = replay(running(), ("ok", 0, 0), ("ok", 2, 0), ("ok", 1, 0))

    group, said = rounds.leave(group)
    assert said == ((0, Done(attempt=0)),)
    assert rounds.leave(group) == (group, ())


@pytest.mark.parametrize(
    "event", [("ready", 1, 1), ("ready", 1, 0)], ids=["of the next attempt", "of this attempt, again"]
)
def test_one_out_of_step_ends_the_job_rather_than_mixing_attempts(event: tuple[Any, ...]) -> None:
    group, said = replay(running(), event)

    assert group.stage is Stage.OVER
    assert all(message.final and "during attempt 0" in message.why for _, message in said)


def test_a_member_that_plays_the_leader_ends_the_job() -> None:
    group, said = rounds.hear(running(), 1, Welcome(host="x"))

    assert group.stage is Stage.OVER
    assert len(said) == 2


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (hello(run_id="other"), "belongs to run 'other', node 0 to 'r'; check --rdzv-id"),
        (hello(nnodes=4), "--nnodes 4, node 0 with 3"),
        (hello(3), "has no place in --nnodes 3; --node-rank counts from 0 to 2"),
        (hello(0, host="b"), "--node-rank 0 given twice: on host-0 and b"),
        (hello(2, host="b"), "--node-rank 2 given twice: on host-2 and b"),
        (hello(nproc=0), "has no ranks"),
        (hello(), None),
    ],
)
def test_who_does_not_fit_is_told_why(said: Hello, why: str | None) -> None:
    group, _ = replay(gathering(), ("come", 2, 2))

    answer = rounds.refusal(group, said)
    assert (answer is None) if why is None else (answer is not None and why in answer and "\n" not in answer)


def test_news_of_the_last_attempt_do_not_end_the_next_join() -> None:
    member, _ = rounds.join(Member(), 0)
    member, _ = rounds.receive(member, Go(attempt=0, first_rank=0, world_size=2))
    member, said = rounds.tell(member, ok=False, final=False, why="")
    assert said == Ended(attempt=0, ok=False, final=False, why="")
    member, _ = rounds.join(member, 1)

    assert rounds.receive(member, Failed(attempt=0, final=False, why="")) == (member, False)
    assert rounds.receive(member, Go(attempt=0, first_rank=0, world_size=2)) == (member, False)
    assert rounds.receive(member, Failed(attempt=0, final=True, why=""))[1] is True


def test_a_failure_may_be_told_again_when_it_becomes_final() -> None:
    member = Member(phase=MemberPhase.RUNNING)
    member, first = rounds.tell(member, ok=False, final=False, why="a")
    member, second = rounds.tell(member, ok=False, final=True, why="a")
    member, third = rounds.tell(member, ok=False, final=True, why="a")

    assert (first is not None, second is not None, third) == (True, True, None)


# -- any order


@dataclass
class Agent:
    """A node's agent as the launcher's state table behaves, reduced to what a rendezvous can see."""

    member: Member
    restarts_left: int
    live: bool = False
    stopping: bool = False
    again: bool = True
    ended: str = ""


class Job:
    """Leader, members and the lines between them, each in order, in whatever interleaving is drawn."""

    def __init__(self, nnodes: int, restarts: list[int]) -> None:
        self.group = rounds.gather(run_id="r", nnodes=nnodes, leader=Node(nproc=1, host="h"))
        self.agents = [Agent(member=Member(), restarts_left=left) for left in restarts]
        self.up: list[deque[Any]] = [deque() for _ in restarts]
        self.down: list[deque[Any]] = [deque() for _ in restarts]
        for rank in range(1, nnodes):
            self.apply(rounds.arrive(self.group, rank, Node(nproc=1, host="h")))
        for rank in range(nnodes):
            self.join(rank, 0)

    def apply(self, result: rounds.Result) -> None:
        self.group, sends = result
        for rank, message in sends:
            self.down[rank].append(message)

    def say(self, rank: int, message: Any) -> None:
        if message is not None:
            self.up[rank].append(message)

    def join(self, rank: int, attempt: int) -> None:
        agent = self.agents[rank]
        agent.member, ready = rounds.join(agent.member, attempt)
        self.say(rank, ready)

    def tell(self, rank: int, *, ok: bool, final: bool) -> None:
        agent = self.agents[rank]
        agent.member, ended = rounds.tell(agent.member, ok=ok, final=final, why="w")
        self.say(rank, ended)

    # what an agent does

    def attempt_over(self, rank: int) -> None:
        """Ranks are dead: tell, and join again or end."""
        agent = self.agents[rank]
        agent.live = agent.stopping = False
        again = agent.again and agent.restarts_left > 0
        self.tell(rank, ok=False, final=not again)
        if again:
            agent.restarts_left -= 1
            self.join(rank, agent.member.attempt + 1)
        else:
            agent.ended = "failure"

    def heard(self, rank: int, message: Any) -> None:
        agent = self.agents[rank]
        agent.member, news = rounds.receive(agent.member, message)
        if not news or agent.ended:
            return
        if isinstance(message, Go):
            attempts = {other.member.attempt for other in self.agents if other.live}
            assert attempts <= {message.attempt}, "ranks of two attempts are alive at once"
            assert not agent.live
            agent.live = True
        elif isinstance(message, Done):
            assert not any(other.live for other in self.agents), "done while ranks are at work"
            agent.ended = "success"
        else:
            agent.again = agent.again and not message.final
            if agent.live:
                agent.stopping = True
            else:
                self.attempt_over(rank)

    def moves(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for rank, agent in enumerate(self.agents):
            found += [("up", rank)] if self.up[rank] else []
            found += [("down", rank)] if self.down[rank] else []
            if agent.live and not agent.stopping:
                found += [("good end", rank), ("bad end", rank)]
            if agent.stopping:
                found += [("ranks dead", rank)]
            if rank and self.group.stage is Stage.LEAVING and rank in self.group.nodes and agent.ended:
                found += [("closed", rank)]
        return found

    def move(self, word: str, rank: int) -> None:
        if word == "up":
            self.apply(rounds.hear(self.group, rank, self.up[rank].popleft()))
        elif word == "down":
            self.heard(rank, self.down[rank].popleft())
        elif word == "good end":
            self.agents[rank].live = False
            self.tell(rank, ok=True, final=False)
        elif word == "closed":
            self.apply(rounds.gone(self.group, rank, "connection closed"))
        else:
            self.attempt_over(rank)


@settings(max_examples=300)
@given(st.data())
def test_no_order_of_events_loses_a_go_or_overlaps_attempts(data: st.DataObject) -> None:
    restarts = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    job = Job(len(restarts), restarts)
    for _ in range(2_000):
        moves = job.moves()
        if not moves:
            break
        job.move(*data.draw(st.sampled_from(moves)))
    else:
        raise AssertionError("the job does not end")

    outcomes = {agent.ended for agent in job.agents}
    assert outcomes in ({"success"}, {"failure"}), "all nodes end, and all alike"
    assert job.group.stage is Stage.OVER


@settings(max_examples=200)
@given(st.data())
def test_a_node_that_is_gone_ends_the_job_everywhere(data: st.DataObject) -> None:
    nnodes = data.draw(st.integers(2, 4))
    job = Job(nnodes, [2] * nnodes)
    for _ in range(data.draw(st.integers(0, 60))):
        moves = job.moves()
        if not moves:
            break
        job.move(*data.draw(st.sampled_from(moves)))
    lost = data.draw(st.integers(1, nnodes - 1))
    if lost not in job.group.nodes or job.group.stage in (Stage.LEAVING, Stage.OVER):
        return
    job.apply(rounds.gone(job.group, lost, "no word"))
    job.agents[lost].ended, job.agents[lost].live, job.agents[lost].stopping = "lost", False, False
    job.up[lost].clear()
    job.down[lost].clear()
    while moves := [move for move in job.moves() if move[1] != lost]:
        job.move(*data.draw(st.sampled_from(moves)))

    assert {agent.ended for rank, agent in enumerate(job.agents) if rank != lost} == {"failure"}


# -- checkpoints


def readied(*offers: list[str]) -> NodeGroup:
    """A group of so many nodes, of which all but the last are ready, each with its offers."""
    group = rounds.gather(run_id="job", nnodes=len(offers), leader=Node(nproc=1, host="h0"))
    for rank in range(1, len(offers)):
        group, _ = rounds.arrive(group, rank, Node(nproc=1, host=f"h{rank}"))
    for rank, keys in enumerate(offers[:-1]):
        _, ready = rounds.join(Member(), 0, keys)
        assert ready is not None
        group, _ = rounds.hear(group, rank, ready)
    return group


def resumed_from(*offers: list[str]) -> set[str]:
    """What the nodes are told to go on from."""
    _, ready = rounds.join(Member(), 0, offers[-1])
    assert ready is not None
    _, sends = rounds.hear(readied(*offers), len(offers) - 1, ready)
    return {message.resume for _, message in sends if isinstance(message, Go)}


def test_all_nodes_go_on_from_the_same_checkpoint() -> None:
    assert resumed_from(["step-3", "step-2"], ["step-3", "step-2"]) == {"step-3"}


def test_a_checkpoint_that_one_node_cannot_read_is_passed_over() -> None:
    assert resumed_from(["step-3", "step-2", "step-1"], ["step-2", "step-1"], ["step-1", "step-2"]) == {"step-2"}


def test_with_none_in_common_all_begin_from_the_start() -> None:
    assert resumed_from(["step-3"], ["step-2"]) == {""}
    assert resumed_from(["step-3"], []) == {""}


def test_a_name_that_the_wire_would_change_is_not_offered() -> None:
    assert resumed_from(["a|b", "line\nbreak", "step-1"], ["a|b", "line\nbreak", "step-1"]) == {"step-1"}


def test_offers_that_do_not_fit_are_cut_between_two_names() -> None:
    long = [f"step-{n:0300d}" for n in (3, 2, 1)]

    heard = decode(encode(Ready(attempt=0, offers="".join(f"{key}|" for key in long))))

    assert isinstance(heard, Ready)
    group, _ = rounds.hear(readied([], []), 0, heard)
    _, sends = rounds.hear(group, 1, heard)
    assert {message.resume for _, message in sends if isinstance(message, Go)} == {long[0]}


def test_a_preempted_node_takes_the_others_with_it_and_says_that_nothing_failed() -> None:
    group = readied(["x"], ["x"])
    group, _ = rounds.hear(group, 1, Ready(attempt=0))
    running = Member(phase=MemberPhase.RUNNING, attempt=0)

    _, ended = rounds.tell(running, ok=False, final=True, why="SIGUSR1", preempted=True)
    assert ended is not None
    _, sends = rounds.hear(group, 1, ended)

    assert [(rank, message.preempted, message.final) for rank, message in sends if isinstance(message, Failed)] == [
        (0, True, True)
    ]


def test_nodes_agree_on_the_newest_that_they_name_alike() -> None:
    """`last.pt` on disks of their own, of steps 200 and 100, is not one checkpoint; what both have of step 100 is."""
    here = ["step 200:last.pt", "step 100:step_100.pt"]
    there = ["step 100:last.pt", "step 100:step_100.pt"]

    assert resumed_from(here, there) == {"step 100:step_100.pt"}
    assert resumed_from(here[:1], there[:1]) == {""}
    assert resumed_from(here[:1], here[:1]) == {"step 200:last.pt"}
