"""All ranks act at the same step, soon after one of them was told, and without a vote at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.checkpoint.votes import INTERVAL_S, Votes


@dataclass
class Told:
    """What one rank's agent says: from the step `preempt_at` on, and from each of `asks` on."""

    preempt_at: int = 10**9
    asks: tuple[int, ...] = ()
    step: int = 0

    @property
    def preempted(self) -> bool:
        return self.step >= self.preempt_at

    @property
    def save_requests(self) -> int:
        return sum(self.step >= ask for ask in self.asks)


@dataclass
class Reductions:
    """The greatest of each value over all ranks; the n-th of one rank meets the n-th of every other."""

    ranks: int
    proposals: list[list[Sequence[int]]] = field(default_factory=list)

    def of(self, rank: int):
        launched = 0

        def launch(values: Sequence[int]) -> Result:
            nonlocal launched
            if len(self.proposals) == launched:
                self.proposals.append([])
            self.proposals[launched].append(values)
            launched += 1
            return Result(self, launched - 1)

        return launch


@dataclass
class Result:
    reductions: Reductions
    number: int

    def result(self) -> list[int]:
        launched = self.reductions.proposals[self.number]
        assert len(launched) == self.reductions.ranks, "read before every rank could have launched it"
        return [max(values) for values in zip(*launched, strict=True)]


def run(told: list[Told], step_s: list[float], steps: int) -> tuple[list[tuple[int, bool, bool]], Reductions]:
    """What happened, as (step, end, save), until the end; ranks walk in step, as data-parallel ones do."""
    reductions = Reductions(len(told))
    clocks = [0.0] * len(told)
    votes = [Votes(each, reductions.of(rank), lambda rank=rank: clocks[rank]) for rank, each in enumerate(told)]
    happened: list[tuple[int, bool, bool]] = []
    for step in range(1, steps + 1):
        answers = set()
        for rank, each in enumerate(told):
            each.step = step
            clocks[rank] += step_s[rank]
            answers.add(votes[rank].at_boundary())
        (answer,) = answers
        if any(answer):
            happened.append((step, *answer))
        if answer[0]:
            break
    return happened, reductions


durations = st.floats(0.001, 3.0)


@given(st.lists(durations, min_size=2, max_size=4), st.integers(1, 200), st.data())
def test_all_end_at_the_same_step(step_s: list[float], preempt_at: int, data: st.DataObject) -> None:
    """`run` itself fails if two ranks differ. The delay is that of two votes: about a second, or two slow steps."""
    told = [Told() for _ in step_s]
    told[data.draw(st.integers(0, len(step_s) - 1))].preempt_at = preempt_at

    happened, _ = run(told, step_s, steps=3000)

    ((step, end, _),) = happened
    fastest = min(step_s)
    assert end
    assert 0 <= step - preempt_at <= 2 * max(INTERVAL_S / fastest, 1) + 2


def test_every_request_is_heard_once() -> None:
    """Two ranks of one node read the same page, so both hear each request; a rank of another node hears its own."""
    told = [Told(asks=(40, 400)), Told(asks=(40, 400)), Told(asks=(700,))]

    happened, _ = run(told, [0.01] * 3, steps=1000)

    assert [(end, save) for _, end, save in happened] == [(False, True)] * 3
    assert [0 < step - asked <= 102 for (step, _, _), asked in zip(happened, (40, 400, 700), strict=True)] == [True] * 3


def test_a_request_that_the_ranks_hear_of_in_different_votes_is_one() -> None:
    for asked in range(20, 120):
        told = [Told(asks=(asked,)), Told(asks=(asked + 1,))]

        happened, _ = run(told, [0.01] * 2, steps=400)

        assert [(end, save) for _, end, save in happened] == [(False, True)], asked


def test_votes_are_about_two_a_second() -> None:
    _, reductions = run([Told(), Told()], [0.01, 0.01], steps=10_000)

    assert 195 <= len(reductions.proposals) <= 215  # 100 seconds


def test_slow_steps_vote_each_time() -> None:
    _, reductions = run([Told(), Told()], [2.0, 2.0], steps=50)

    assert len(reductions.proposals) == 50


def test_a_rank_alone_acts_at_once() -> None:
    told = Told(preempt_at=5, asks=(3,))
    votes = Votes(told, None)

    answers = []
    for told.step in range(1, 6):
        answers.append(votes.at_boundary())

    assert answers == [(False, False), (False, False), (False, True), (False, False), (True, False)]
