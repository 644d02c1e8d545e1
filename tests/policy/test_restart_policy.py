"""Restart or stop: short histories with a clock of their own, and what must hold for every history."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.failure.blame import blame
from gpulaunch.launcher.failure.classify import Kind
from gpulaunch.launcher.failure.ends import RankEnd
from gpulaunch.launcher.policy import restart
from gpulaunch.launcher.policy.restart import TABLE, Action, Decision, Failure, Limits, RestartHistory, decide
from rank_ends import rank_end, rank_error

UNCHARGED = {Kind.NODE_LOSS, Kind.PREEMPTED, Kind.STOPPED, Kind.CHECKPOINT_IN_USE}
GENEROUS = Limits(max_restarts=1000, rate=None, backoff_max_s=60.0, no_progress=None)


def failure(kind: Kind | None = Kind.EXCEPTION, **fields: Any) -> Failure:
    values: dict[str, Any] = {
        "kind": kind,
        "signature": kind.value if kind is not None else "",
        "at_s": 100.0,
        "step": None,
        "resumed_step": None,
        "uptime_s": 5.0,
    }
    return Failure(**{**values, **fields})


def live(limits: Limits, *failures: Failure) -> list[Decision]:
    """What is decided, failure after failure, until it is the end."""
    history, decisions = RestartHistory(), list[Decision]()
    for one in failures:
        history, decision = decide(limits, history, one)
        decisions.append(decision)
        if not decision.again:
            break
    return decisions


def test_the_first_restart_is_immediate_and_plain() -> None:
    (decision,) = live(GENEROUS, failure())

    assert decision == Decision(again=True, wait_s=0.0, charged=True, why="", code=None)


def test_an_exception_that_repeats_at_the_same_step_is_stopped_the_second_time() -> None:
    _, second = live(GENEROUS, failure(step=120), failure(step=120))

    assert (second.again, second.code) == (False, 93)
    assert second.why == "the same exception after 120 steps as before: another attempt would repeat it"
    # From a checkpoint, too: what it had got to is the same step as before.
    assert not live(GENEROUS, failure(step=120), failure(step=120, resumed_step=100))[-1].again


@pytest.mark.parametrize("resumed_step", [None, 100])
def test_equal_exceptions_before_the_first_step_are_restarted_as_often_as_asked(resumed_step: int | None) -> None:
    """A flaky mount, a slow license server: --max-restarts 3 says to try three times again."""
    asked = replace(GENEROUS, max_restarts=3)
    one = failure(resumed_step=resumed_step)

    *again, last = live(asked, *[one] * 9)

    assert [(each.again, each.wait_s) for each in again] == [(True, 0.0), (True, 1.0), (True, 2.0)]
    assert (last.again, last.code, last.why) == (False, None, "all 3 restarts allowed by --max-restarts are used")

    _, _, third = live(replace(asked, no_progress=3), *[one] * 9)
    assert (third.again, third.code) == (False, 93)
    assert third.why == "3 failures in a row without progress, the last one before the first step (--no-progress-limit)"


def test_a_transient_exception_is_one_that_does_not_come_again_there() -> None:
    """The network fails at one step and then at others: another place, another message, or after progress."""
    assert live(GENEROUS, failure(step=120), failure(step=300))[-1].again
    assert live(GENEROUS, failure(step=120), failure(step=60))[-1].again
    assert live(GENEROUS, failure(step=120), failure(step=120, signature="another"))[-1].again
    first, _, third = live(GENEROUS, failure(step=120), failure(step=300), failure(step=120))
    assert (first.again, third.again) == (True, True)


def test_the_same_step_is_the_same_though_a_checkpoint_was_saved_before_it() -> None:
    """Saved at 100 by the first attempt, which died at 120: the second resumes from there and dies at 120 again."""
    assert not live(GENEROUS, failure(step=120), failure(step=120, resumed_step=100))[-1].again
    # Ranks that nobody sees step: the newer checkpoint is all that is known, and it is progress.
    assert live(GENEROUS, failure(), failure(resumed_step=100))[-1].again
    twice = [failure(resumed_step=100)] * 2
    assert live(GENEROUS, failure(), *twice)[-1].again
    assert not live(replace(GENEROUS, no_progress=3), failure(), *twice, *twice)[-1].again


def test_a_signal_in_between_does_not_hide_that_an_exception_repeats() -> None:
    killed = failure(Kind.SIGNAL, step=50)

    assert not live(GENEROUS, failure(step=120), killed, failure(step=120))[-1].again


def test_a_program_that_cannot_be_parsed_is_not_started_again() -> None:
    (decision,) = live(GENEROUS, failure(Kind.SYNTAX))

    assert (decision.again, decision.code) == (False, 93)


@pytest.mark.parametrize("kind", [Kind.EXIT_CODE, Kind.SEGFAULT, Kind.HANG, Kind.HOST_OOM, Kind.PEER, None])
def test_what_may_pass_by_itself_is_given_up_after_three_in_a_row(kind: Kind | None) -> None:
    decisions = live(GENEROUS, *[failure(kind, step=7)] * 9)

    assert [decision.wait_s for decision in decisions] == [0.0, 1.0, 0.0]
    assert decisions[1].why == "no progress in 2 attempts: waiting 1 s before the next one"
    assert (decisions[-1].again, decisions[-1].code) == (False, 93)
    assert decisions[-1].why == "3 failures in a row without progress, the last one after 7 steps (--no-progress-limit)"


def test_a_script_as_torchrun_knows_it_keeps_its_restarts_and_its_code() -> None:
    """Twelve kills of ranks that are never seen to step; `raise SystemExit(40)` with --max-restarts 2."""
    kills = live(replace(GENEROUS, max_restarts=12), *[failure(Kind.SIGNAL)] * 20)
    assert [(decision.again, decision.wait_s) for decision in kills] == [(True, 0.0)] * 12 + [(False, 0.0)]

    exits = live(replace(GENEROUS, max_restarts=2), *[failure(Kind.EXIT_CODE)] * 20)
    assert [decision.again for decision in exits] == [True, True, False]
    assert exits[-1].code is None, "the rank's own: the user's budget ended it"
    assert exits[-1].why == "all 2 restarts allowed by --max-restarts are used"

    (never,) = live(replace(GENEROUS, max_restarts=0), failure(Kind.SYNTAX))
    assert (never.again, never.code, never.why) == (False, None, "")


def test_progress_keeps_a_long_run_alive() -> None:
    days = [failure(Kind.SEGFAULT, step=1000 * day, resumed_step=1000 * day - 100) for day in range(1, 100)]

    assert all(decision.again and decision.wait_s == 0.0 for decision in live(GENEROUS, *days))


def test_a_program_that_resumes_by_itself_shows_its_progress_by_its_long_life() -> None:
    """Its steps are counted anew by each attempt: they say nothing, unless it is the same exception at the same one."""
    days = [failure(Kind.SEGFAULT, step=1000 - day, uptime_s=80_000.0) for day in range(50)]
    assert all(decision.again for decision in live(GENEROUS, *days))
    plain = [failure(Kind.EXCEPTION, uptime_s=80_000.0)] * 50
    assert all(decision.again for decision in live(GENEROUS, *plain))

    repeating = [failure(Kind.EXCEPTION, step=1000, uptime_s=80_000.0)] * 50
    assert len(live(GENEROUS, *repeating)) == 2
    # Where it can be seen that nothing comes of it, a long life is none.
    seen = [failure(Kind.SEGFAULT, step=1000, resumed_step=900, uptime_s=80_000.0)] * 50
    assert len(live(GENEROUS, *seen)) == 3


def test_the_pause_grows_up_to_its_bound() -> None:
    limits = replace(GENEROUS, no_progress=0, backoff_max_s=10.0)

    waits = [decision.wait_s for decision in live(limits, *[failure(Kind.ABORT)] * 7)]

    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    none = live(replace(limits, backoff_max_s=0.0), *[failure(Kind.ABORT)] * 3_000)
    assert (len(none), none[-1].again, none[-1].wait_s) == (1001, False, 0.0)


def test_a_rate_is_used_up_and_comes_back() -> None:
    limits = replace(GENEROUS, rate=(2, 60.0))
    at = [failure(Kind.SIGNAL, at_s=at_s) for at_s in (0.0, 10.0, 50.0)]

    assert [decision.again for decision in live(limits, *at)] == [True, True, False]
    assert live(limits, *at)[-1].why == "--restart-rate allows 2 restarts within 60 s, and all are used"
    assert all(decision.again for decision in live(limits, *at[:2], failure(Kind.SIGNAL, at_s=60.0)))


def test_the_rate_is_of_restarts_and_not_of_failures() -> None:
    """Pauses of 0, 1 and 2 s: restarts at 0, 41 and 71.5."""
    limits = replace(GENEROUS, no_progress=0, rate=(1, 30.0))

    assert all(one.again for one in live(limits, *[failure(Kind.ABORT, at_s=at_s) for at_s in (0.0, 40.0, 69.5)]))
    assert not live(limits, *[failure(Kind.ABORT, at_s=at_s) for at_s in (0.0, 40.0, 68.5)])[-1].again


def test_nobody_pauses_for_what_somebody_outside_did() -> None:
    waits = [one.wait_s for one in live(GENEROUS, failure(Kind.ABORT), failure(Kind.ABORT), failure(Kind.SIGNAL))]

    assert waits == [0.0, 1.0, 0.0]


def test_a_faulty_card_asks_for_another_machine() -> None:
    first, second = live(GENEROUS, *[failure(Kind.GPU_HARDWARE)] * 3)

    assert first.again
    assert (second.again, second.code) == (False, 75)
    (none_left,) = live(replace(GENEROUS, max_restarts=0), failure(Kind.GPU_HARDWARE))
    assert none_left.code == 75


def test_the_loss_of_a_node_is_not_charged() -> None:
    history, decision = decide(GENEROUS, RestartHistory(), failure(Kind.NODE_LOSS))
    assert (decision.again, decision.charged, history.restarts) == (True, False, 0)
    decision = decide(replace(GENEROUS, max_restarts=0), RestartHistory(), failure(Kind.NODE_LOSS))[1]
    assert (decision.again, decision.code) == (False, 75)


def test_a_preempted_job_is_to_be_run_again_by_somebody_else() -> None:
    history, decision = decide(GENEROUS, RestartHistory(restarts=7), failure(Kind.PREEMPTED))

    assert (decision.again, decision.code, history.restarts) == (False, 75, 7)
    assert decide(GENEROUS, RestartHistory(), failure(Kind.STOPPED))[1].code is None


def test_a_checkpoint_directory_in_use_is_for_later_and_an_exit_code_69_of_the_programs_is_not() -> None:
    """93, which three in a row would give, is FailJob in Kubernetes; 69 is run again later."""
    history, decision = decide(GENEROUS, RestartHistory(restarts=7), failure(Kind.CHECKPOINT_IN_USE))

    assert (decision.again, decision.code, history.restarts) == (False, 69, 7)
    assert decide(GENEROUS, RestartHistory(), failure(Kind.EXIT_CODE))[1].again


def test_every_kind_has_a_row() -> None:
    assert set(TABLE) == set(Kind)
    assert {kind for kind, row in TABLE.items() if not row.charged} == UNCHARGED
    assert [kind for kind, row in TABLE.items() if row.action is Action.GIVE_UP] == [Kind.SYNTAX]


# -- for every history

LIMITS = st.builds(
    Limits,
    max_restarts=st.integers(0, 12),
    rate=st.none() | st.tuples(st.integers(1, 5), st.floats(1.0, 1000.0)),
    backoff_max_s=st.floats(0.0, 60.0),
    no_progress=st.none() | st.integers(0, 5),
)
STEP = st.none() | st.integers(0, 20)
KINDS = st.none() | st.sampled_from(Kind)
FAILURES = st.lists(
    st.builds(
        Failure,
        kind=KINDS,
        signature=st.sampled_from(["a", "b", ""]),
        at_s=st.floats(0.0, 400.0),  # here: after the restart before
        step=STEP,
        resumed_step=STEP,
        uptime_s=st.floats(0.0, 1000.0),
    ),
    max_size=40,
)


@given(LIMITS, FAILURES)
def test_no_budget_is_ever_exceeded(limits: Limits, failures: list[Failure]) -> None:
    """Also by somebody who asks on after the end."""
    history, now_s, restarts_s = RestartHistory(), 0.0, list[float]()
    for one in failures:
        now_s += one.at_s
        before = history
        history, decision = decide(limits, history, replace(one, at_s=now_s))
        assert 0.0 <= decision.wait_s <= limits.backoff_max_s
        assert decision.charged == (history.restarts > before.restarts)
        assert not (decision.charged and one.kind in UNCHARGED)
        if decision.charged:
            now_s += decision.wait_s
            restarts_s.append(now_s)
    assert len(restarts_s) <= limits.max_restarts
    if limits.rate is not None:
        most, window_s = limits.rate
        for end_s in restarts_s:
            assert sum(end_s - window_s < when_s <= end_s for when_s in restarts_s) <= most


@given(KINDS, STEP, STEP, st.floats(0.0, 599.0), st.none() | st.integers(1, 5))
def test_an_endless_identical_failure_always_ends(
    kind: Kind | None, step: int | None, resumed: int | None, uptime_s: float, limit: int | None
) -> None:
    limits = replace(GENEROUS, no_progress=limit, max_restarts=50)
    same = failure(kind, step=step, resumed_step=resumed, uptime_s=uptime_s)

    decisions = live(limits, *[same] * 60)

    if kind is Kind.NODE_LOSS:  # that is never the end of it here
        assert all(decision.again and not decision.charged for decision in decisions)
    elif kind in (Kind.SIGNAL, Kind.INTERRUPT):
        assert len(decisions) == 51
    else:
        assert not decisions[-1].again
        assert len(decisions) <= (max(limit, 2) if limit else 51 if step is None else 3)


@given(FAILURES, st.sampled_from(Kind), st.booleans())
def test_progress_always_makes_it_start_anew(failures: list[Failure], kind: Kind, by_checkpoint: bool) -> None:
    limits = replace(GENEROUS, max_restarts=10_000)
    history = RestartHistory()
    for one in failures:
        history, _ = decide(limits, history, one)

    further = failure(kind, step=None, resumed_step=100) if by_checkpoint else failure(kind, step=100)
    _, decision = decide(limits, history, further)

    row = TABLE[kind]
    assert decision.wait_s == 0.0
    assert decision.again == (row.action in (Action.RESTART, Action.REPLACE))


@given(FAILURES)
def test_what_is_remembered_stays_small(failures: list[Failure]) -> None:
    history = RestartHistory()
    for one in failures * 20:
        history, _ = decide(replace(GENEROUS, no_progress=0), history, one)

    assert len(history.seen) <= 8
    assert history.recent_s == ()


# -- signatures


def raised(name: str, message: str, line: int = 27) -> RankEnd:
    trace = (
        'Traceback (most recent call last):\n  File "train.py", line 31, in <module>\n    main()\n'
        f'  File "train.py", line {line}, in main\n    step()\n{name}: {message}\n'
    )
    return rank_end(error=rank_error(name, message, at=1.0, traceback=trace))


def signature(one: RankEnd) -> str:
    return restart.signature(blame([one]))


def test_a_signature_has_what_stays_the_same() -> None:
    first = raised("ValueError", "bad loss nan at 0x7f3a in /scratch/tmpa8x1, batch 12")

    assert signature(first) == "exception: ValueError: bad loss nan at in batch at train.py:27"
    assert signature(raised("ValueError", "bad loss nan at 0x7fff in /scratch/tmpq0, batch 7")) == signature(first)
    for other in (raised("ValueError", "bad loss", 27), raised("ValueError", "bad loss nan at in batch", 28)):
        assert signature(other) != signature(first)


def test_a_signature_of_what_left_no_exception() -> None:
    assert signature(rank_end(code=None, signal=11)) == "segfault: SIGSEGV"
    assert signature(rank_end(code=3)) == "exit_code: exit code 3"
    assert signature(raised("SystemExit", "40")) == "exit_code: exit code 1"
    printed = ("Traceback (most recent call last):", "ValueError: x 17")
    assert signature(rank_end(tail=printed)) == "exception: exit code 1: ValueError: x"
