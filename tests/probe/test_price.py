"""When steps are made without the probe, what comes of the comparison, and when it is too much."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.probe import price
from gpulaunch.profiler.probe.price import BLOCK, DEFAULT_BUDGET_PPM, Budget, Comparison, budget_ppm

US = 1_000
MS = 1_000_000
S = 1_000_000_000


class Job:
    """A job whose steps take as long as `step_ns` says of a step's number, and `cost_ns` more where they are seen."""

    def __init__(self, step_ns: Callable[[int], int], cost_ns: int = 0) -> None:
        self.comparison = Comparison()
        self.steps = 0
        self.bare: list[int] = []
        self.lasted_ns: deque[int] = deque(maxlen=BLOCK)
        self._step_ns = step_ns
        self._cost_ns = cost_ns

    def run(self, steps: int) -> None:
        until = self.steps + steps
        while self.steps < until:
            self._make(seen=True)
            if self.steps >= self.comparison.turn and self.comparison.take(self.steps, self.lasted_ns):
                for _ in range(BLOCK * self.comparison.blocks):
                    self.bare.append(self.steps)
                    self._make(seen=False)
                self.comparison.bare_ended(self.steps, self.lasted_ns)

    def observe_one_of(self, blocks: int) -> None:
        self.comparison.observe_one_of(blocks, self.steps)
        self.bare.clear()

    def _make(self, *, seen: bool) -> None:
        self.lasted_ns.append(self._step_ns(self.steps) + (self._cost_ns if seen else 0))
        self.steps += 1


def noisy(step_ns: int, seed: int) -> Callable[[int], int]:
    """Steps that differ by some percent, and now and then by much."""
    chance = random.Random(seed)
    return lambda _: round(step_ns * (chance.gauss(1, 0.03) + (chance.random() < 0.02)))


@pytest.mark.parametrize("cost_us", [0, 20, 200])
def test_the_cost_comes_out_of_noisy_steps(cost_us):
    job = Job(noisy(2 * MS, seed=cost_us), cost_us * US)
    job.run(200_000)
    found = job.comparison

    assert found.pairs == 128
    assert abs(found.cost_ns - cost_us * US) < 4 * found.error_ns
    assert 0 < found.error_ns < 0.02 * 2 * MS


def test_even_steps_give_the_cost_exactly():
    job = Job(lambda _: MS, cost_ns=20 * US)
    job.run(20_000)

    assert (job.comparison.cost_ns, job.comparison.error_ns) == (20 * US, 0)


def test_nothing_is_said_after_a_few_comparisons():
    job = Job(lambda _: MS, cost_ns=20 * US)
    job.run(3_000)

    assert 0 < job.comparison.entered < 16
    assert (job.comparison.pairs, job.comparison.cost_ns) == (0, 0)


def test_few_steps_are_bare_and_fewer_later():
    job = Job(lambda _: MS)
    job.run(20_000)
    early = len(job.bare)
    job.run(200_000)
    late = len(job.bare) - early

    assert min(job.bare) >= 256
    assert early < 0.035 * 20_000
    assert 0 < late < 0.011 * 200_000


def test_all_ranks_make_the_same_steps_bare():
    one, another = Job(noisy(2 * MS, seed=1)), Job(noisy(2 * MS, seed=2))
    one.run(50_000)
    another.run(50_000)

    assert one.bare == another.bare


@pytest.mark.parametrize("every", [8, 10, 64, 256, 1000])
def test_what_a_program_does_every_so_often_is_not_taken_for_the_cost(every):
    job = Job(lambda step: MS + (5 * MS if step % every == 0 else 0), cost_ns=20 * US)
    job.run(200_000)

    assert abs(job.comparison.cost_ns - 20 * US) <= 4 * max(job.comparison.error_ns, US)


def test_long_steps_are_never_bare():
    """Nobody would see for minutes where the rank is; and what is a price beside them?"""
    job = Job(lambda _: S)
    job.run(5_000)

    assert job.bare == []
    assert job.comparison.turn > 5_000


def test_a_block_that_ends_early_does_not_count():
    comparison = Comparison()
    turn = comparison.turn
    assert not comparison.take(turn, [MS] * BLOCK)
    assert comparison.take(turn + BLOCK, [MS] * BLOCK)
    comparison.give_up(turn + BLOCK + 3)

    assert comparison.entered == 0
    assert comparison.turn > turn + BLOCK + 3


def test_a_rank_that_gives_up_stays_with_the_others():
    """Rank 0 saves in the middle of a block; the others make it to its end."""
    alone, others = Comparison(), Comparison()
    for comparison in (alone, others):
        assert not comparison.take(256, [MS] * BLOCK)
        assert comparison.take(264, [MS] * BLOCK)
    alone.give_up(267)
    others.bare_ended(272, [MS] * BLOCK)
    assert not others.take(280, [MS] * BLOCK)

    assert alone.turn == others.turn > 280
    assert (alone.entered, others.entered) == (0, 1)


def test_a_turn_that_was_missed_starts_afresh():
    """The first steps of a loop without optimizer are published as one."""
    comparison = Comparison()
    assert not comparison.take(comparison.turn + 5, [MS] * BLOCK)

    assert comparison.entered == 0
    assert comparison.turn > 261


# --- not every step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_of", [2, 4, 16])
def test_of_so_many_blocks_one_is_observed(one_of):
    job = Job(lambda _: MS, cost_ns=20 * US)
    job.run(1_000)
    job.observe_one_of(one_of)
    job.run(160_000)

    assert len(job.bare) == pytest.approx(160_000 * (1 - 1 / one_of), rel=0.01)
    assert job.comparison.pairs == 128, "and the price is still known"
    assert (job.comparison.cost_ns, job.comparison.error_ns) == (20 * US, 0)


def test_ranks_that_observe_fewer_blocks_observe_some_of_the_same():
    jobs = {one_of: Job(noisy(MS, seed=one_of)) for one_of in (2, 8)}
    for one_of, job in jobs.items():
        job.run(300 + one_of)
        job.observe_one_of(one_of)
        job.run(20_000)
    observed = {one_of: set(range(1_000, 20_000)) - set(job.bare) for one_of, job in jobs.items()}

    assert observed[8] < observed[2]


def test_a_rank_that_gives_up_meets_the_others_in_the_next_round():
    comparison = Comparison()
    comparison.observe_one_of(4, 1_000)
    assert comparison.turn == 1_024 + BLOCK
    assert comparison.take(1_032, [MS] * BLOCK)
    assert comparison.blocks == 3
    comparison.give_up(1_045)

    assert comparison.turn == 1_056 + BLOCK
    assert not comparison.take(1_050, [MS] * BLOCK), "not its turn"
    assert comparison.turn == 1_056 + BLOCK


def test_nobody_is_out_of_sight_for_long():
    comparison = Comparison()
    comparison.observe_one_of(16, 1_000)

    assert comparison.take(comparison.turn, [100 * MS] * BLOCK)
    assert comparison.blocks == 2, "2 s of 12"
    comparison.bare_ended(comparison.turn + BLOCK, [100 * MS] * BLOCK)
    assert comparison.turn % (16 * BLOCK) == BLOCK
    assert not comparison.take(comparison.turn, [S] * BLOCK)


# --- the budget -----------------------------------------------------------------------------------------------------

EVERYTHING = int(Hook.LOADER_QUEUE | Hook.SAMPLES | Hook.COPIES | Hook.SYNCS | Hook.GPU_TIME | Hook.BACKWARD)


class Watched:
    """Steps of 2 ms, seen by a budget after every 250th."""

    def __init__(self, ppm: int, own_us: float = 0, cost_us: float = 0, error_us: float = 0, pairs: int = 64) -> None:
        self.budget = Budget(ppm)
        self.own_us = own_us
        self.comparison = Comparison()
        self.comparison.pairs = pairs
        self.comparison.cost_ns = round(cost_us * US)
        self.comparison.error_ns = round(error_us * US)
        self.now_ns = S
        self.own_ns = 0.0
        self.steps = 0
        self.step_ns = 0

    def too_high(self) -> bool:
        self.now_ns += 250 * 2 * MS
        self.steps += 250
        self.step_ns += 250 * 2 * MS
        self.own_ns += 250 * self.own_us * US
        return self.budget.too_high(self.now_ns, self.steps, self.step_ns, round(self.own_ns), self.comparison)

    def times(self, looks: int = 1_000) -> int:
        return sum(self.too_high() for _ in range(looks))


@pytest.mark.parametrize(
    ("watched", "over"),
    [
        (Watched(DEFAULT_BUDGET_PPM, own_us=6.5), False),
        (Watched(DEFAULT_BUDGET_PPM, own_us=7), True),
        (Watched(DEFAULT_BUDGET_PPM, own_us=2, cost_us=20, error_us=2), True),
        (Watched(DEFAULT_BUDGET_PPM, own_us=2, cost_us=20, error_us=6), False),
        (Watched(DEFAULT_BUDGET_PPM, own_us=2, cost_us=20, error_us=2, pairs=16), False),
        (Watched(DEFAULT_BUDGET_PPM, own_us=2, cost_us=-20, error_us=2), False),
        (Watched(50_000, own_us=60, cost_us=60, error_us=1), False),
        (Watched(0, own_us=500, cost_us=500, error_us=1), False),
    ],
    ids=[
        "cheap",
        "dear",
        "dear as seen from outside",
        "perhaps",
        "too early to say",
        "below zero",
        "allowed",
        "no limit",
    ],
)
def test_what_is_too_much(watched, over):
    assert (watched.times() > 0) is over


def test_a_short_program_is_told_about_rather_than_spared():
    watched = Watched(DEFAULT_BUDGET_PPM, own_us=50)

    assert watched.times(looks=60) == 0, "30 s"
    assert watched.times(looks=3) == 1
    assert watched.times(looks=16) == 0, "10 s, to see what it has saved"
    assert watched.times(looks=3) == 1


def test_what_is_dear_once_is_not_dear():
    watched = Watched(DEFAULT_BUDGET_PPM, own_us=1)
    watched.times(looks=100)
    for _ in range(100):
        watched.comparison.cost_ns, watched.comparison.error_ns = 100 * US, 0
        assert not watched.too_high()
        assert not watched.too_high()
        watched.comparison.cost_ns = 0
        assert not watched.too_high()


def test_one_part_after_the_other_is_switched_off_until_nothing_is_left():
    watched = Watched(DEFAULT_BUDGET_PPM, own_us=50)
    armed, shed = EVERYTHING, []
    for _ in range(1_000):
        if watched.too_high():
            hook = watched.budget.next_of(armed)
            armed &= ~hook
            shed.append(hook)

    assert shed[:2] == list(price.SHED)
    assert set(shed[2:]) == {Hook(0)}, "then it is for the others to step aside"
    assert armed == Hook.LOADER_QUEUE | Hook.BACKWARD | Hook.SAMPLES, "steps, phases, samples and the queue stay"


@pytest.mark.parametrize(("own_us", "one_of"), [(9, 2), (12, 4), (15, 8), (900, 16)])
def test_when_nothing_is_left_fewer_steps_are_observed_as_few_as_are_within_the_budget(own_us, one_of):
    watched = Watched(DEFAULT_BUDGET_PPM, own_us=own_us, pairs=0)
    assert watched.budget.next_of(0) == Hook(0)
    assert any(watched.too_high() for _ in range(100))

    assert watched.budget.blocks(1) == one_of
    watched.comparison.one_of = one_of
    watched.own_us = own_us / one_of
    assert watched.times() == 0 or own_us == 900


def test_what_is_not_in_service_is_passed_over():
    budget = Budget(DEFAULT_BUDGET_PPM)

    assert budget.next_of(int(Hook.LOADER_QUEUE | Hook.SYNCS)) == Hook.SYNCS
    assert budget.next_of(EVERYTHING) == Hook(0)


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
