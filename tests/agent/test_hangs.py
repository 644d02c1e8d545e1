"""What the agent does once it has been told that the ranks hang."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from gpulaunch.launcher.agent import hangs
from gpulaunch.launcher.agent.account import Account
from gpulaunch.launcher.hang.values import Verdict

if TYPE_CHECKING:
    from gpulaunch.launcher.agent.group import Group
    from gpulaunch.launcher.agent.surroundings import Surroundings


class Watch:
    """Stands for the watch over the ranks: its verdict is the test's."""

    on_hang: Callable[[Verdict], None]

    def __init__(self, *watched: Any, **_: Any) -> None:
        Watch.on_hang = watched[-1]

    def start(self) -> None:
        """Nothing is watched."""


@pytest.mark.parametrize("on_hang", ["stop", "report"])
def test_the_sidecar_has_heard_of_a_hang_before_anybody_is_ended_for_it(
    monkeypatch: pytest.MonkeyPatch, on_hang: str
) -> None:
    """By default a hang ends the job, within the second in which it would be told of by the way."""
    monkeypatch.setattr(hangs, "HangWatch", Watch)
    told: list[int] = []
    ended: list[list[int]] = []
    around = SimpleNamespace(
        loop=SimpleNamespace(now=lambda: 1000.0),
        pages=SimpleNamespace(read=lambda rank: None, account=lambda run: told.append(run["hangs"])),
        spec=SimpleNamespace(
            resume_arg=None,
            checkpoint_dirs=(),
            hang_timeout_s=600.0,
            first_step_timeout_s=1800.0,
            nnodes=1,
            on_hang=on_hang,
        ),
        rundir=SimpleNamespace(attempt_dir=lambda attempt: "attempts/0", event=lambda what, **fields: None),
        base_env={"GPULAUNCH_RUN_ID": "aaaa"},
    )
    group = SimpleNamespace(live={0: 4000, 1: 4001}, rank_of=lambda local: local, mark_hung=lambda ranks, why: None)
    surroundings = cast("Surroundings", around)
    watching = hangs.Hangs(
        surroundings,
        account=Account(surroundings, began_s=900.0),
        say=lambda line: None,
        on_hang=lambda: ended.append(list(told)),
    )

    watching.begin(cast("Group", group), 0)
    Watch.on_hang(Verdict(hung=True, rule="odd-one-out", sentence="rank 1 waits", odd=(1,)))

    assert told == [1]
    assert ended == ([[1]] if on_hang == "stop" else [])


MUTUAL = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    {waits}
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("waits", "told"),
    [
        ("dist.recv(torch.zeros(1), src=1 - dist.get_rank())", "wait in recv"),
        ("dist.irecv(torch.zeros(1), src=1 - dist.get_rank()).wait()", "wait in Work.wait"),
    ],
    ids=["recv", "irecv().wait"],
)
def test_ranks_that_wait_for_each_other_are_seen_as_such_through_the_profilers_taps(
    gpulaunch: Any, tmp_path: Path, waits: str, told: str
) -> None:
    """What waits has no Python frame, and the last one above it is the tap of torch's Work.wait: whoever took it for a
    place of its own waited 140 s, as for a pause between two steps."""
    (tmp_path / "mutual.py").write_text(textwrap.dedent(MUTUAL).replace("{waits}", waits))

    ended = gpulaunch("--nproc", "2", "--job-dir", tmp_path / "job", tmp_path / "mutual.py", timeout_s=400)

    assert ended.code == 124, ended
    lines = (tmp_path / "job/events.jsonl").read_text().splitlines()
    (hung,) = (event for event in map(json.loads, lines) if event["event"] == "hung")
    assert hung["rule"] == "deadlock"
    assert told in hung["why"]
