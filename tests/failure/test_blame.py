"""Who failed first: short histories, and the promise that the order of arrival never matters."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.failure.blame import blame, exit_code, torch_exit_code
from gpulaunch.launcher.failure.classify import Kind


def test_a_rank_that_raised_is_named_though_its_peers_died_before_it(
    make_end: Any, make_echo: Any, make_error: Any
) -> None:
    slow_to_die = make_end(1, at_s=115.0, error=make_error("ValueError", "x", at=110.2))

    verdict = blame([make_echo(0, at=110.0), slow_to_die, make_echo(2, at=110.3)])

    assert verdict.first is slow_to_die
    assert verdict.kind is Kind.EXCEPTION
    assert [end.rank for end in verdict.echoes] == [0, 2]
    assert verdict.why == "the other failed ranks only lost a peer"


def test_of_two_own_failures_the_earlier_exception_counts_and_not_the_earlier_death(
    make_end: Any, make_error: Any
) -> None:
    earlier = make_end(3, at_s=112.0, error=make_error("ValueError", "x", at=110.0))
    later = make_end(0, at_s=111.0, error=make_error("TypeError", "y", at=110.5))

    verdict = blame([later, earlier])

    assert verdict.first is earlier
    assert verdict.also == (later,)
    assert verdict.why == "it failed 500 ms before another rank that failed too"


def test_a_kill_is_older_than_an_exception_that_came_after_it(make_end: Any, make_error: Any) -> None:
    killed = make_end(2, signal=signal.SIGKILL, at_s=110.0)
    raised = make_end(1, at_s=111.0, error=make_error("ValueError", "x", at=110.9))

    assert blame([raised, killed]).first is killed
    assert blame([raised, make_end(2, signal=signal.SIGKILL, at_s=111.0)]).first is raised


def test_ranks_that_the_launcher_stopped_are_never_the_cause(make_end: Any, make_echo: Any) -> None:
    stopped = [make_end(rank, stopped=True, signal=signal.SIGTERM, at_s=109.0) for rank in (0, 1)]
    echo = make_echo(2)

    assert blame([*stopped, echo]).first is echo
    assert blame(stopped).kind is Kind.STOPPED


def test_a_rank_that_raised_and_was_stopped_in_its_clean_up_is_the_cause(
    make_end: Any, make_echo: Any, make_error: Any
) -> None:
    hung = make_end(1, stopped=True, signal=signal.SIGKILL, at_s=140.0, error=make_error("ValueError", "x", at=110.0))

    verdict = blame([make_echo(0, at=110.1), hung, make_echo(2, at=110.2)])

    assert verdict.first.rank == 1
    assert verdict.kind is Kind.EXCEPTION


def test_a_rank_that_raised_because_it_was_stopped_is_not_the_cause(
    make_end: Any, make_echo: Any, make_error: Any
) -> None:
    told = make_end(1, stopped=True, at_s=112.0, error=make_error("Shutdown", "SIGTERM", at=111.0))

    assert blame([make_echo(0, at=110.1), told]).first.rank == 0


def test_an_early_exit_with_success_is_the_cause_of_echoes_only(make_end: Any, make_echo: Any, make_error: Any) -> None:
    left = make_end(1, code=0, at_s=109.0)
    finished = make_end(2, code=0, at_s=111.0)

    early = blame([make_echo(0, at=110.0), left, finished])
    assert early.first is left
    assert early.kind is Kind.EARLY_EXIT_0
    assert exit_code(early.first) == 1

    assert blame([make_echo(0, at=110.0), finished]).kind is Kind.PEER, "who finished after the echo did not cause it"
    raised = make_end(3, at_s=112.0, error=make_error("ValueError", "x"))
    assert blame([left, make_echo(0), raised]).first is raised


def test_only_echoes_mean_that_the_origin_is_elsewhere(make_echo: Any) -> None:
    verdict = blame([make_echo(2, at=110.2), make_echo(0, at=110.1)])

    assert verdict.first.rank == 0
    assert verdict.kind is Kind.PEER
    assert "outside this node" in verdict.why


HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"
FRAME = 'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    g()\n'
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1\n"


def test_an_exception_whose_clean_up_lost_its_peers_yields_to_a_plain_one(
    make_end: Any, make_echo: Any, make_error: Any
) -> None:
    """A handled KeyError before a lost peer, or a ValueError whose clean-up lost it: only the other ranks can tell."""
    text = f"{FRAME}KeyError: 'x'\n{HANDLING}{FRAME}{LOST}"
    unclear = make_end(0, at_s=110.0, error=make_error("RuntimeError", "lost", traceback=text, at=109.9))
    plain = make_end(1, at_s=111.0, error=make_error("ValueError", "x", at=110.9))

    assert blame([unclear, plain, make_echo(2)]).first is plain
    assert blame([unclear, plain]).echoes == (unclear,)
    assert blame([unclear, make_echo(2, at=100.0)]).first is unclear


HUNG = "ranks 0, 2 wait in all_reduce, rank 1 is in train.py:88 open()"


def test_a_hang_is_the_cause_and_what_the_others_raised_when_stopped_is_not(
    make_end: Any, make_echo: Any, make_error: Any
) -> None:
    """The hung rank dies last: it was killed after the others had heard SIGTERM."""
    hung = make_end(1, signal=signal.SIGKILL, at_s=141.5, hang=HUNG, hung_s=140.0)
    told = make_end(0, stopped=True, at_s=140.2, error=make_error("Shutdown", "SIGTERM", at=140.1))
    lost = replace(make_echo(2, at=140.3), stopped=True)

    verdict = blame([told, hung, lost])

    assert verdict.first is hung
    assert verdict.kind is Kind.HANG
    assert verdict.why == "it made no progress, and the others waited for it"
    assert (verdict.also, verdict.echoes) == ((), (lost,))
    assert exit_code(hung) == 124, "the signal was the launcher's"
    assert blame([hung]).why == "it made no progress"
    assert blame([hung, replace(hung, rank=0)]).why == "it made no progress, and no other rank did"
    # Where nobody knows since when, what stopped ranks say is not held against them.
    assert blame([told, replace(hung, hung_s=None), lost]).first.rank == 1


def test_an_exception_before_the_hang_is_the_cause_of_it(make_end: Any, make_error: Any) -> None:
    hung = make_end(1, signal=signal.SIGKILL, at_s=141.5, hang=HUNG, hung_s=140.0)
    raised = make_end(2, stopped=True, signal=signal.SIGKILL, at_s=141.5, error=make_error("ValueError", "x", at=110.0))

    assert blame([hung, raised]).first.rank == 2
    itself = replace(hung, error=make_error("ValueError", "x", at=110.0))
    assert (blame([itself]).kind, exit_code(itself)) == (Kind.EXCEPTION, 1)


def test_a_preempted_job_blames_nobody(make_end: Any, make_echo: Any, make_error: Any) -> None:
    """Ranks that saved and ended, one that lost them as peers, one that was through already."""
    saved = make_error("Preempted", "75", traceback=f"{FRAME}gpulaunch.checkpoint.save.Preempted: 75\n", at=110.0)
    by_themselves = [make_end(rank, code=75, at_s=110.1, error=saved) for rank in (0, 1)]
    through = make_end(3, code=0, at_s=109.0)

    verdict = blame([*by_themselves, make_echo(2, at=109.9), through])

    assert (verdict.kind, verdict.first.rank, verdict.why) == (
        Kind.PREEMPTED,
        0,
        "no rank failed: the job was asked to end",
    )
    assert exit_code(verdict.first) == 75
    assert [end.rank for end in verdict.echoes] == [2]
    told = [replace(end, stopped=True) for end in (*by_themselves, make_echo(2))]
    assert blame(told).kind is Kind.PREEMPTED
    assert blame(told[2:]).kind is Kind.STOPPED, "it lost its peers because all were stopped"


def test_a_failure_while_the_others_were_preempted_is_a_failure(make_end: Any, make_error: Any) -> None:
    saved = make_error("Preempted", "75", traceback=f"{FRAME}gpulaunch.checkpoint.save.Preempted: 75\n", at=110.0)
    failed = make_end(1, at_s=112.0, error=make_error("OSError", "[Errno 28] No space left on device", at=111.9))

    assert blame([make_end(0, code=75, at_s=110.1, error=saved), failed]).first is failed


def test_no_ends_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="at least one"):
        blame([])


def test_torch_is_told_of_signals_by_negative_codes_but_not_of_those_after_an_exception(
    make_end: Any, make_error: Any
) -> None:
    raised = make_error("ValueError", "x", at=109.0)
    assert torch_exit_code(make_end(signal=signal.SIGKILL)) == -9
    assert torch_exit_code(make_end(code=3)) == 3
    assert torch_exit_code(make_end(signal=signal.SIGTERM, error=raised)) == 1
    assert torch_exit_code(make_end(signal=signal.SIGSEGV, error=raised)) == -11


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"code": 3}, 3),
        ({"code": 255}, 255),
        ({"signal": signal.SIGKILL}, 137),
        ({"signal": signal.SIGSEGV}, 139),
        ({"code": 0}, 1),
        ({"code": None}, 1),
    ],
)
def test_the_exit_code_is_the_first_causes_own(make_end: Any, fields: dict[str, Any], expected: int) -> None:
    assert exit_code(make_end(**fields)) == expected


TIME = st.integers(100_000, 130_000).map(lambda ms: ms / 1000)


@given(cause_at=TIME, echoes_at=st.lists(TIME, min_size=1, max_size=7), stopped=st.integers(0, 3), data=st.data())
def test_the_root_is_the_same_whatever_order_the_echoes_arrive_in(
    make_end: Any,
    make_echo: Any,
    make_error: Any,
    cause_at: float,
    echoes_at: list[float],
    stopped: int,
    data: st.DataObject,
) -> None:
    cause = data.draw(
        st.sampled_from(
            [
                make_end(0, at_s=cause_at, error=make_error("ValueError", "x", at=cause_at)),
                make_end(0, at_s=cause_at, error=make_error("ValueError", "x")),
                make_end(0, at_s=cause_at, signal=signal.SIGKILL),
                make_end(0, at_s=cause_at, code=3),
            ]
        )
    )
    echoes = [make_echo(rank, at=at) for rank, at in enumerate(echoes_at, 1)]
    others = [make_end(10 + i, at_s=131.0 + i, stopped=True, signal=signal.SIGTERM) for i in range(stopped)]

    verdict = blame(data.draw(st.permutations([cause, *echoes, *others])))

    assert verdict.first is cause
    assert verdict.echoes == tuple(echoes)


@given(data=st.data())
def test_the_verdict_is_a_function_of_the_set_of_ends(
    make_end: Any, make_echo: Any, make_error: Any, data: st.DataObject
) -> None:
    makers = [
        lambda rank, at: make_echo(rank, at=at),
        lambda rank, at: make_end(rank, at_s=at, code=0),
        lambda rank, at: make_end(rank, at_s=at, signal=signal.SIGKILL),
        lambda rank, at: make_end(rank, at_s=at + 1, error=make_error("ValueError", "x", at=at)),
        lambda rank, at: make_end(rank, at_s=at, stopped=True, signal=signal.SIGTERM),
        lambda rank, at: make_end(rank, at_s=at + 9, stopped=True, error=make_error("ValueError", "x", at=at)),
    ]
    drawn = data.draw(st.lists(st.tuples(st.sampled_from(makers), TIME), min_size=1, max_size=8))
    ends = [make(rank, at) for rank, (make, at) in enumerate(drawn)]

    verdict = blame(ends)

    assert blame(data.draw(st.permutations(ends))) == verdict
    assert len(verdict.ends) == len(ends)
    if verdict.kind is Kind.PEER:
        assert not any(end.signal == signal.SIGKILL and not end.stopped for end in ends), "an echo hid a kill"


def test_a_rank_that_left_a_moment_before_or_after_the_first_echo_is_the_cause(make_end: Any, make_echo: Any) -> None:
    """Its sockets close before its end is seen, so which of the two looks older is chance."""
    echo = make_echo(0)

    for at_s in (echo.at_s - 0.2, echo.at_s + 0.05):
        verdict = blame([echo, make_end(1, code=0, at_s=at_s)])

        assert verdict.first.rank == 1
    long_after = blame([echo, make_end(1, code=0, at_s=echo.at_s + 60)])
    assert long_after.first.rank == 0


def test_a_rank_that_had_lost_its_peer_before_it_was_stopped_is_an_echo(make_end: Any, make_echo: Any) -> None:
    killed = make_end(1, code=None, signal=9, at_s=100.0)
    stopped = replace(make_echo(0), stopped=True, code=None, signal=15)

    verdict = blame([stopped, killed])

    assert verdict.first.rank == 1
    assert [end.rank for end in verdict.echoes] == [0]
