"""How long it rests between two looks: what looking may cost, whatever it costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.samplers.stacks import BUDGET, CREDIT_S, Allowance, rest_s


@given(cost_s=st.floats(0.0001, 1.0), first=st.integers(0, 10**6))
def test_what_looking_costs_stays_within_the_budget(cost_s: float, first: int) -> None:
    rests = [rest_s(cost_s, turn, refusals=0) for turn in range(first, first + 100)]

    assert 100 * cost_s / sum(rests) <= BUDGET * 1.02


def test_a_cheap_look_comes_twenty_times_a_second() -> None:
    rests = [rest_s(0.0, turn, refusals=0) for turn in range(1000)]

    assert 1000 / sum(rests) == pytest.approx(20, rel=0.01)


def test_rests_do_not_keep_step_with_the_steps() -> None:
    """After each rest another part of a step of half a second is seen: all tenths of it, about as often."""
    at_s, seen = 0.0, [0] * 10
    for turn in range(1000):
        at_s += rest_s(0.0, turn, refusals=0)
        seen[int(at_s % 0.5 * 20)] += 1

    assert min(seen) > 50


def test_failures_are_repeated_less_and_less_often() -> None:
    rests = [rest_s(0.0, 0, refusals=refusals) for refusals in range(20)]

    assert rests[0] == rests[1] == rests[2] < rests[3]
    assert rests[3:] == sorted(rests[3:])
    assert rests[-1] == rest_s(0.0, 0, refusals=10**9) <= 60


@pytest.mark.parametrize("cost_s", [0.0006, 0.003, 0.08])
def test_a_run_has_many_samples_at_first_and_then_those_that_the_budget_allows(cost_s: float) -> None:
    now_s, spent_s, allowance = 100.0, 0.0, Allowance(100.0)
    at_s: list[float] = []
    for turn in range(5000):
        if len(at_s) == 3:  # the first step
            allowance.extend()
        at_s.append(now_s)
        spent_s += cost_s
        now_s += rest_s(allowance.owed_s(cost_s, now_s), turn, refusals=0)

    assert spent_s <= BUDGET * (now_s - 100.0) * 1.02 + CREDIT_S + cost_s
    within_20_s = sum(each < at_s[3] + 20.0 for each in at_s[3:])
    assert within_20_s >= min(380.0, CREDIT_S / cost_s)


def test_what_is_not_used_for_hours_is_not_used_at_once() -> None:
    allowance = Allowance(0.0)
    allowance.extend()

    assert allowance.owed_s(CREDIT_S, 36_000.0) == 0.0
    assert allowance.owed_s(0.01, 36_000.0) == 0.01
    allowance.extend()
    assert allowance.owed_s(0.01, 36_000.0) == 0.02
