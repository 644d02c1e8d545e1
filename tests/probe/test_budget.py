"""How many steps are observed: what the probe costs, what it may cost, and what follows."""

from __future__ import annotations

import pytest

from gpulaunch.profiler.probe.budget import (
    BLOCK,
    DEFAULT_BUDGET_PPM,
    MOST_BLOCKS,
    NEVER,
    Budget,
    Totals,
    budget_ppm,
    next_turn,
    one_of,
)

US = 1_000
MS = 1_000_000
S = 1_000_000_000
LIMIT_US = 10
"""Half a percent of 2 ms."""


class Watched:
    """Steps of 2 ms, whose budget is looked at once a second. What is not observed costs no more than its calls."""

    def __init__(
        self, observed_us: float, calls_us: float = 0, ppm: int = DEFAULT_BUDGET_PPM, step_ms: float = 2
    ) -> None:
        self.budget = Budget(ppm)
        self.observed_us, self.calls_us, self.step_ms = observed_us, calls_us, step_ms
        self.seconds = self.steps = self.unobserved = 0
        self.step_ns = self.cost_ns = 0.0

    def train(self, seconds: int) -> list[int]:
        """Of how many blocks one was observed, after each second."""
        found = []
        for _ in range(seconds):
            steps = 500
            observed = steps // self.budget.one_of
            self.seconds += 1
            self.steps += steps
            self.unobserved += steps - observed
            self.step_ns += S
            self.cost_ns += US * (observed * self.observed_us + steps * self.calls_us)
            totals = Totals(self.seconds * S, self.steps, self.unobserved, round(self.step_ns), round(self.cost_ns))
            self.budget.look(totals, round(self.calls_us * US))
            found.append(self.budget.one_of)
        return found


def test_within_the_budget_all_steps_are_observed():
    watched = Watched(observed_us=6, calls_us=3.9)

    assert set(watched.train(3600)) == {1}


@pytest.mark.parametrize(
    ("observed_us", "calls_us", "blocks"),
    [(10.1, 0, 2), (8, 3, 2), (15, 3, 4), (40, 1, 8), (80, 5, 16), (500, 5, 16), (1, 11, 16)],
    ids=["just beyond", "with its calls", "by half", "by far", "as few as can be", "more than is saved", "calls alone"],
)
def test_past_the_budget_as_many_are_observed_as_are_within_it(observed_us, calls_us, blocks):
    watched = Watched(observed_us, calls_us)
    found = watched.train(600)

    assert found[-1] == blocks
    assert set(found) == {1, blocks}, "at once, and to stay"
    assert blocks == MOST_BLOCKS or observed_us / blocks + calls_us <= LIMIT_US
    assert observed_us / (blocks / 2) + calls_us > LIMIT_US


def test_a_short_program_is_told_about_rather_than_spared():
    found = Watched(observed_us=50).train(60)

    assert found.index(8) == 30, "half a minute after the first look"


def test_without_a_limit_all_steps_are_observed():
    assert set(Watched(observed_us=5000, ppm=0).train(600)) == {1}


def test_what_is_dear_once_is_not_dear():
    """A compilation, or another process that has the cores: two looks in a row, and then it is over."""
    watched = Watched(observed_us=5)
    watched.train(1)
    for _ in range(20):
        watched.observed_us = 500
        assert set(watched.train(20)) == {1}
        watched.observed_us = 5
        assert set(watched.train(10)) == {1}


def test_where_it_is_cheaper_again_more_steps_are_observed_again():
    watched = Watched(observed_us=50)
    assert watched.train(60)[-1] == 8
    watched.observed_us = 5

    assert watched.train(31)[-1] == 1


def test_a_cost_about_the_limit_does_not_make_it_go_to_and_fro():
    """One of two blocks is observed: to observe all again it must be cheaper by more than a little."""
    watched = Watched(observed_us=10.5)
    assert watched.train(60)[-1] == 2
    for observed_us in (9.5, 10.5, 8, 7.5) * 20:
        watched.observed_us = observed_us
        assert set(watched.train(30)) == {2}


def test_looks_that_contradict_each_other_change_nothing():
    watched = Watched(observed_us=15)
    assert watched.train(60)[-1] == 2
    for observed_us in (1, 100) * 30:
        watched.observed_us = observed_us
        assert set(watched.train(10)) == {2}


def test_a_figure_below_zero_is_no_cost():
    """The calls are told to cost less than when they were added up, or more: either is possible."""
    watched = Watched(observed_us=0, calls_us=3)
    watched.train(20)
    watched.cost_ns -= 20_000 * 3 * US

    assert set(watched.train(60)) == {1}


def test_nothing_is_judged_while_no_step_ends():
    budget = Budget(DEFAULT_BUDGET_PPM)
    for second in range(600):
        budget.look(Totals(second * S, 10, 0, 20 * MS, 10 * MS), 0)

    assert budget.one_of == 1


@pytest.mark.parametrize(("step_ms", "blocks"), [(2, 16), (20, 8), (100, 2), (250, 2), (251, 1)])
def test_a_rank_is_never_unobserved_for_more_than_two_seconds(step_ms, blocks):
    """Where the rank is would not be known for long."""
    found = one_of(observed_ns=S, calls_ns=S, step_ns=step_ms * MS, limit_ns=1)

    assert found == blocks
    assert (found - 1) * BLOCK * step_ms <= 2_000


# --- which steps ----------------------------------------------------------------------------------------------------


def observed(blocks: int, steps: int, since: int = 0) -> set[int]:
    """The steps (from 0) that a rank observes which has known since step `since` that it is to observe one of so many
    blocks."""
    found, step = set[int](), since
    while step < steps:
        turn = next_turn(step, blocks)
        found |= set(range(step, min(turn, steps)))
        step = turn + (blocks - 1) * BLOCK
    return found


@pytest.mark.parametrize("blocks", [2, 4, 8, 16])
def test_of_so_many_blocks_one_is_observed(blocks):
    steps = 100 * blocks * BLOCK

    assert observed(blocks, steps) == {step for step in range(steps) if step // BLOCK % blocks == 0}


def test_all_ranks_observe_the_same_steps_whenever_they_began_to():
    early, late = observed(4, 5_000, since=96), observed(4, 5_000, since=1_003)

    assert {step for step in early if step >= 1_100} == {step for step in late if step >= 1_100}


def test_ranks_that_observe_fewer_blocks_observe_some_of_the_same():
    for fewer, more in ((4, 2), (8, 2), (16, 4)):
        assert observed(fewer, 20_000) < observed(more, 20_000)


def test_the_next_turn_is_a_later_one():
    for steps in range(200):
        assert next_turn(steps, 4) > steps
        assert next_turn(steps, 4) % 32 == BLOCK
        assert next_turn(steps, 1) == NEVER


@pytest.mark.parametrize(
    ("text", "ppm"),
    [
        ("0.5", 5_000),
        ("0", 0),
        ("100", 1_000_000),
        ("", 5_000),
        ("a lot", 5_000),
        ("nan", 5_000),
        ("-1", 0),
        ("inf", 5_000),
    ],
)
def test_the_budget_is_handed_down_in_percent(text, ppm):
    assert budget_ppm(text) == ppm
