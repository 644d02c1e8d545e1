"""The exit code of a job, as a table; every row of docs/exit-codes.md that the agent decides. No process."""

from __future__ import annotations

from typing import Any

import pytest

from gpulaunch.launcher.agent.events import Outcome
from gpulaunch.launcher.agent.outcome import JobEnd, blame_of, preempted_line, reason_for_peers, tier_of
from gpulaunch.launcher.failure.causes import Tier
from gpulaunch.launcher.policy.restart import Decision
from rank_ends import echo_end, rank_end


def decision(*, again: bool = False, code: int | None = None, why: str = "") -> Decision:
    return Decision(again=again, wait_s=0.0, charged=True, why=why, code=code)


OWN = blame_of([rank_end(code=3)])
ECHO = blame_of([echo_end()])


@pytest.mark.parametrize(
    ("job", "code", "stopped_by"),
    [
        ({"outcome": Outcome.SUCCESS}, 0, ""),
        ({"outcome": Outcome.SUCCESS, "preempted": True, "signum": 15}, 0, ""),
        ({"outcome": Outcome.SIGNAL, "signum": 2}, 130, "SIGINT"),
        ({"outcome": Outcome.SIGNAL, "signum": 2, "resumable": True}, 130, "SIGINT"),
        ({"outcome": Outcome.SIGNAL, "signum": 15, "preempted": True}, 143, "SIGTERM"),
        ({"outcome": Outcome.SIGNAL, "signum": 15, "preempted": True, "resumable": True}, 75, "SIGTERM"),
        ({"outcome": Outcome.FAILURE, "blame": OWN}, 3, ""),
        ({"outcome": Outcome.FAILURE}, 1, ""),
        ({"outcome": Outcome.FAILURE, "blame": OWN, "decision": decision(code=93)}, 93, ""),
        ({"outcome": Outcome.FAILURE, "blame": OWN, "decision": decision(again=True)}, 3, ""),
        # A failure on top of a preemption: restarted if it could be, so the next run of the same command does.
        (
            {"outcome": Outcome.FAILURE, "preempted": True, "signum": 15, "resumable": True, "blame": OWN}
            | {"decision": decision(again=True)},
            75,
            "SIGTERM",
        ),
        (
            {"outcome": Outcome.FAILURE, "preempted": True, "signum": 15, "blame": OWN}
            | {"decision": decision(again=True)},
            143,
            "SIGTERM",
        ),
        (
            {"outcome": Outcome.FAILURE, "preempted": True, "signum": 15, "resumable": True, "blame": OWN}
            | {"decision": decision()},
            3,
            "",
        ),
        # A lost node is no fault of the program's, unless a rank here has failed by itself.
        ({"outcome": Outcome.PEER_FAILURE, "node_lost": True}, 75, ""),
        ({"outcome": Outcome.FAILURE, "node_lost": True, "blame": ECHO}, 75, ""),
        ({"outcome": Outcome.FAILURE, "node_lost": True, "blame": OWN}, 3, ""),
        ({"outcome": Outcome.PEER_FAILURE}, 1, ""),
    ],
)
def test_the_exit_code_of_a_job(job: dict[str, Any], code: int, stopped_by: str) -> None:
    over = JobEnd(**job)

    assert (over.exit_code, over.stopped_by) == (code, stopped_by)


def test_ranks_that_ended_because_they_were_told_to_are_not_to_blame() -> None:
    assert blame_of([]) is None
    assert blame_of([rank_end(code=0)]) is None
    assert blame_of([rank_end(stopped=True)]) is None
    found = blame_of([rank_end(0, stopped=True), rank_end(1)])
    assert found is not None
    assert found.first.rank == 1


def test_how_much_an_end_explains() -> None:
    assert tier_of(None) is Tier.NONE
    assert tier_of(ECHO) is Tier.ECHO
    assert tier_of(OWN) is Tier.OWN


def test_what_the_other_nodes_are_told() -> None:
    def told(**fields: Any) -> str:
        return reason_for_peers(**({"signum": 0, "blame": None, "hang": "", "decision": None, "error": ""} | fields))

    assert told(signum=15, blame=blame_of([rank_end()])) == "asked to end by SIGTERM"
    assert told(hang="rank 1 sleeps", blame=blame_of([rank_end()])) == "the ranks hang: rank 1 sleeps"
    assert told(blame=blame_of([rank_end(1)]), decision=decision(why="in vain")).startswith("rank 1")
    assert told(blame=blame_of([rank_end(1)]), decision=decision(why="in vain")).endswith("; not restarted: in vain")
    assert told(blame=blame_of([rank_end(code=0)]), error="the store is gone") == "the store is gone"


def test_what_the_exit_code_of_a_preempted_job_means() -> None:
    assert preempted_line(None, 75) == "exit code 75: run the same command again to resume"
    assert "specify its directory with --checkpoint-dir" in preempted_line(None, 143)
