"""The agent's decisions: histories of what happened and what must follow, without a process or a clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.agent.events import (
    EVENT_TYPES,
    Action,
    Arm,
    Clear,
    Cleared,
    Deadline,
    Disarm,
    Event,
    Expired,
    Finish,
    Hung,
    Join,
    Joined,
    Kill,
    Notice,
    Outcome,
    PeerFailed,
    PeerPreempted,
    PeersDone,
    Phase,
    RankEnded,
    Report,
    Signalled,
    Start,
    Started,
    StartFailed,
    State,
    Stop,
    StoreLost,
    TellPeers,
)
from gpulaunch.launcher.agent.state import SIGTERM, TABLE, UNKILLABLE_S, first, step

RANKS = frozenset({0, 1, 2})
GRACE = Arm(deadline=Deadline.GRACE, after_s=30.0)
FAILURE_GRACE = Arm(deadline=Deadline.GRACE, after_s=1.0)
KILL = Arm(deadline=Deadline.KILL, after_s=UNKILLABLE_S)


def play(events: list[Event], *, restarts: int = 0) -> tuple[State, list[Action]]:
    """The state after `events` from the beginning, and everything that was to be done on the way."""
    state, actions = first(restarts=restarts, grace_s=30.0)
    done = list(actions)
    for event in events:
        state, actions = step(state, event)
        done += actions
    return state, done


BEGUN: list[Event] = [Joined(), Started(ranks=RANKS)]


def ended(*local_ranks: int, ok: bool = True, echo: bool = False) -> list[Event]:
    return [RankEnded(local_rank=local_rank, ok=ok, echo=echo) for local_rank in local_ranks]


def test_a_run_that_goes_well_ends_with_success_and_clears_gently() -> None:
    state, done = play([*BEGUN, *ended(0, 1, 2), PeersDone(), Cleared()])

    assert state.phase is Phase.DONE
    assert done == [
        Join(attempt=0),
        Start(attempt=0),
        TellPeers(ok=True, final=False),
        Disarm(),
        Clear(gently=True),
        Finish(outcome=Outcome.SUCCESS),
    ]


def test_one_rank_that_ends_early_and_well_is_waited_on() -> None:
    state, done = play([*BEGUN, *ended(1)])

    assert state.phase is Phase.RUNNING
    assert done == [Join(attempt=0), Start(attempt=0)]


def test_a_failed_rank_stops_the_others_at_once_and_what_they_still_do_is_lost_anyway() -> None:
    _, done = play([*BEGUN, *ended(1, ok=False)])

    assert done[2:] == [Stop(signum=SIGTERM), TellPeers(ok=False, final=True), FAILURE_GRACE]


def test_ranks_that_ignore_being_told_are_killed_when_the_grace_is_over() -> None:
    _, done = play([*BEGUN, *ended(1, ok=False), Expired(deadline=Deadline.GRACE)])

    assert done[-2:] == [Kill(), KILL]


def test_a_rank_that_even_sigkill_does_not_end_does_not_hold_the_launcher() -> None:
    state, done = play(
        [*BEGUN, *ended(1, ok=False), Expired(deadline=Deadline.GRACE), Expired(deadline=Deadline.KILL), Cleared()],
        restarts=5,
    )

    assert done[-1] == Finish(outcome=Outcome.FAILURE)
    assert state.phase is Phase.DONE


def test_an_echo_waits_for_its_cause() -> None:
    echo = [*BEGUN, *ended(0, ok=False, echo=True)]

    state, done = play(echo)
    assert (state.phase, done[-1]) == (Phase.SETTLING, Arm(deadline=Deadline.SETTLE, after_s=1.0))
    assert Stop(signum=SIGTERM) not in done

    state, done = play([*echo, *ended(1, ok=False)])
    assert Stop(signum=SIGTERM) in done

    state, done = play([*echo, Expired(deadline=Deadline.SETTLE)])
    assert Stop(signum=SIGTERM) in done


def test_restarts_are_counted_down_and_each_attempt_is_a_new_one() -> None:
    once = [*BEGUN, *ended(0, ok=False), *ended(1, 2, ok=False), Cleared()]

    state, done = play(once * 3, restarts=2)

    assert [action for action in done if isinstance(action, Start)] == [Start(attempt=n) for n in range(3)]
    assert [action.restarting for action in done if isinstance(action, Report)] == [True, True, False]
    assert state.phase is Phase.DONE


def test_a_signal_is_passed_on_and_forbids_a_restart() -> None:
    _, done = play([*BEGUN, Signalled(signum=2), *ended(0, 1, 2, ok=False), Cleared()], restarts=3)

    assert Stop(signum=2) in done
    assert done[-1] == Finish(outcome=Outcome.SIGNAL)


def test_a_job_that_is_told_to_end_has_the_long_grace() -> None:
    _, done = play([*BEGUN, Signalled(signum=2)])

    assert done[2:] == [Stop(signum=2), TellPeers(ok=False, final=True), GRACE]


def test_the_grace_after_a_failure_is_never_the_longer_one() -> None:
    state, _ = first(restarts=0, grace_s=0.5, failure_grace_s=1.0)

    assert state.failure_grace_s == 0.5


def test_a_preempted_job_is_told_to_save_before_it_is_told_to_end() -> None:
    state, done = play([*BEGUN, Signalled(signum=10, preempted=True), *ended(0, 1, 2, ok=False), Cleared()], restarts=3)

    assert done[2:6] == [
        Notice(signum=10, within_s=30.0),
        Stop(signum=10),
        TellPeers(ok=False, final=True, preempted=True),
        GRACE,
    ]
    assert (done[-1], state.preempted) == (Finish(outcome=Outcome.SIGNAL), True)


def test_a_rank_that_died_of_the_signal_before_we_heard_it_is_no_failure() -> None:
    """A job manager that signals every process of a step: the rank's end may be seen first."""
    state, done = play([*BEGUN, *ended(1, ok=False, echo=True), Signalled(signum=15, preempted=True)], restarts=3)

    assert state.outcome is Outcome.SIGNAL
    assert Notice(signum=15, within_s=30.0) in done


def test_a_job_that_is_preempted_while_it_fails_knows_both() -> None:
    state, done = play([*BEGUN, *ended(0, ok=False), Signalled(signum=15, preempted=True)], restarts=3)

    assert (state.outcome, state.preempted, state.final) == (Outcome.FAILURE, True, True)
    assert done[-1] == TellPeers(ok=False, final=True)


def test_another_nodes_preemption_is_ours_too() -> None:
    state, done = play([*BEGUN, PeerPreempted(), *ended(0, 1, 2, ok=False), Cleared()], restarts=3)

    assert done[2:5] == [Notice(signum=15, within_s=30.0), Stop(signum=15), GRACE]
    assert not any(isinstance(action, TellPeers) for action in done)
    assert (done[-1], state.preempted) == (Finish(outcome=Outcome.SIGNAL), True)


def test_ranks_that_hang_are_stopped_with_a_failures_grace_and_started_again() -> None:
    _, done = play([*BEGUN, Hung(), Expired(deadline=Deadline.GRACE), *ended(0, 1, 2, ok=False), Cleared()], restarts=1)

    assert done[2:5] == [Stop(signum=SIGTERM), TellPeers(ok=False, final=False), FAILURE_GRACE]
    assert done[-1] == Join(attempt=1)


def test_a_hang_after_which_the_user_wants_no_restart() -> None:
    _, done = play([*BEGUN, Hung(final=True), *ended(0, 1, 2, ok=False), Cleared()], restarts=1)

    assert done[-1] == Finish(outcome=Outcome.FAILURE)


FAILED_ONCE: list[Event] = [*BEGUN, *ended(0, ok=False), *ended(1, 2, ok=False)]


def test_a_restart_may_have_to_wait() -> None:
    state, done = play([*FAILED_ONCE, Cleared(pause_s=4.0)], restarts=1)

    assert (state.phase, done[-1]) == (Phase.PAUSING, Arm(deadline=Deadline.PAUSE, after_s=4.0))

    state, done = play([*FAILED_ONCE, Cleared(pause_s=4.0), Expired(deadline=Deadline.PAUSE)], restarts=1)

    assert (state.phase, done[-1]) == (Phase.JOINING, Join(attempt=1))


def test_a_signal_ends_the_pause() -> None:
    _, done = play([*FAILED_ONCE, Cleared(pause_s=4.0), Signalled(signum=2), Cleared()], restarts=1)

    assert done[-1] == Finish(outcome=Outcome.SIGNAL)


def test_when_the_policy_gives_up_the_other_nodes_are_told_so() -> None:
    _, done = play([*FAILED_ONCE, Cleared(again=False)], restarts=5)

    assert done[-3:] == [TellPeers(ok=False, final=True), Report(restarting=False), Finish(outcome=Outcome.FAILURE)]


def test_a_second_signal_ends_at_once() -> None:
    _, done = play([*BEGUN, Signalled(signum=2), Signalled(signum=2)])

    assert done[-2:] == [Kill(), KILL]


def test_a_first_signal_after_a_failure_only_forbids_the_restart() -> None:
    _, done = play([*BEGUN, *ended(0, ok=False), Signalled(signum=15), *ended(1, 2, ok=False), Cleared()], restarts=3)

    assert Kill() not in done
    assert done[-1] == Finish(outcome=Outcome.FAILURE)


def test_a_signal_while_ranks_are_being_started_does_not_wait_for_them() -> None:
    """An import that hangs on a file system would hold the job, and the signal's sender has a limit of its own."""
    state, done = play([Joined(), Signalled(signum=15)])

    assert state.phase is Phase.CLEARING
    assert Kill() in done
    assert Clear(gently=False) in done


def test_when_a_peer_fails_our_ranks_are_stopped_and_all_try_again() -> None:
    state, done = play([*BEGUN, PeerFailed(), *ended(0, 1, 2, ok=False), Cleared()], restarts=1)

    assert Stop(signum=SIGTERM) in done
    assert not any(isinstance(action, TellPeers) for action in done)
    assert (state.phase, done[-1]) == (Phase.JOINING, Join(attempt=1))


def test_the_ranks_save_before_another_node_leaves_and_the_job_goes_on() -> None:
    state, done = play([*BEGUN, PeerFailed(saves=True), *ended(0, 1, 2, ok=False), Cleared()], restarts=1)

    assert done[2:5] == [Notice(signum=SIGTERM, within_s=30.0), Stop(signum=SIGTERM), GRACE]
    assert (state.phase, state.attempt) == (Phase.JOINING, 1)


def test_without_their_store_the_ranks_start_again() -> None:
    _, done = play([*BEGUN, StoreLost(), *ended(0, 1, 2, ok=False), Cleared()], restarts=1)

    assert Stop(signum=SIGTERM) in done
    assert done[-1] == Join(attempt=1)


def test_a_node_that_is_done_runs_again_when_another_fails() -> None:
    state, done = play([*BEGUN, *ended(0, 1, 2), PeerFailed(), Cleared()], restarts=1)

    assert (state.phase, done[-1]) == (Phase.JOINING, Join(attempt=1))


def test_a_program_that_cannot_be_started_is_not_tried_again() -> None:
    state, done = play([Joined(), StartFailed(), Cleared()], restarts=3)

    assert state.phase is Phase.DONE
    assert done[-1] == Finish(outcome=Outcome.FAILURE)


def test_every_pair_of_phase_and_event_has_an_answer() -> None:
    assert set(TABLE) == {(phase, event) for phase in Phase for event in EVENT_TYPES}


EVENTS = st.one_of(
    st.just(Joined()),
    st.builds(Started, ranks=st.frozensets(st.integers(0, 3), min_size=1)),
    st.builds(StartFailed, ranks=st.frozensets(st.integers(0, 3)), final=st.booleans()),
    st.builds(RankEnded, local_rank=st.integers(0, 3), ok=st.booleans(), echo=st.booleans()),
    st.builds(PeerFailed, final=st.booleans(), saves=st.booleans()),
    st.just(PeersDone()),
    st.just(StoreLost()),
    st.builds(Hung, final=st.booleans()),
    st.just(PeerPreempted()),
    st.builds(Signalled, signum=st.sampled_from([2, 15]), preempted=st.booleans()),
    st.builds(Expired, deadline=st.sampled_from(Deadline)),
    st.builds(Cleared, again=st.booleans(), pause_s=st.sampled_from([0.0, 2.0])),
)


@given(st.lists(EVENTS, max_size=40), st.integers(0, 3))
def test_whatever_happens_the_promises_hold(events: list[Event], restarts: int) -> None:
    state, actions = first(restarts=restarts, grace_s=5.0)
    done = list(actions)
    for event in events:
        before = state
        state, actions = step(state, event)
        done += actions
        if before.phase is Phase.DONE:
            assert actions == (), "nothing follows the end"
        if before.signum:
            assert not any(isinstance(action, Join) for action in actions), "no restart after a signal"
    starts = [action.attempt for action in done if isinstance(action, Start)]
    assert starts == sorted(set(starts)), "an attempt is started once"
    assert len(starts) <= restarts + 1
    finishes = [action for action in done if isinstance(action, Finish)]
    assert len(finishes) == (1 if state.phase is Phase.DONE else 0)


@given(st.lists(EVENTS, max_size=20), st.integers(0, 2), st.sampled_from([2, 15]))
def test_from_anywhere_two_signals_and_patience_lead_to_the_end(
    events: list[Event], restarts: int, signum: int
) -> None:
    state, _ = first(restarts=restarts, grace_s=5.0)
    for event in events:
        state, _ = step(state, event)
    ways_out: list[Event] = [Signalled(signum=signum), Signalled(signum=signum), Started(ranks=frozenset({0}))]
    ways_out += [Expired(deadline=Deadline.GRACE), Expired(deadline=Deadline.KILL), Cleared()]

    for event in ways_out:
        state, _ = step(state, event)

    assert state.phase is Phase.DONE
