"""What the agent does once it has been told that the ranks hang."""

from __future__ import annotations

import json
import re
import textwrap
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from gpulaunch.launcher.agent import hangs
from gpulaunch.launcher.agent.goodput_tracker import GoodputTracker
from gpulaunch.launcher.hang.values import Verdict

if TYPE_CHECKING:
    from gpulaunch.launcher.agent.rank_group import RankGroup
    from gpulaunch.launcher.agent.run_context import RunContext
    from gpulaunch.launcher.rendezvous.base import Rendezvous


class Watch:
    """Stands for the watch over the ranks: what it says is the test's."""

    on_late: Callable[[Verdict], None]
    on_over: Callable[[Sequence[int], float], None]
    on_hang: Callable[[Verdict], None]

    def __init__(self, *watched: Any, **_: Any) -> None:
        Watch.on_late, Watch.on_over, Watch.on_hang = watched[-3:]

    def start(self) -> None:
        """Nothing is watched."""


LATE = Verdict(
    tells=True, acts=False, rule="late", sentence="rank 1 is in data.py:31 sleep(), rank 0 waits for it in backward",
    odd=(1,), quiet_s=100.0, due_in_s=500.0, due_by="--hang-timeout", path="attempts/0/hang.json",
)  # fmt: skip


class Job:
    """Two ranks that are watched, and what was said of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, on_hang: str = "restart", where: str = "attempts/0") -> None:
        monkeypatch.setattr(hangs, "HangDetector", Watch)
        self.said: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.told: list[dict[str, Any]] = []
        self.ended: list[int] = []
        context = SimpleNamespace(
            loop=SimpleNamespace(now=lambda: 1000.0),
            segments=SimpleNamespace(read=lambda rank: None, write_run=self.told.append),
            spec=SimpleNamespace(
                resume_arg=None,
                checkpoint_dirs=(),
                hang_timeout_s=600.0,
                first_step_timeout_s=1800.0,
                nnodes=1,
                on_hang=on_hang,
            ),
            rundir=SimpleNamespace(
                attempt_dir=lambda attempt: where, event=lambda what, **fields: self.events.append((what, fields))
            ),
            base_env={"GPULAUNCH_RUN_ID": "aaaa"},
        )
        group = SimpleNamespace(live={0: 4000, 1: 4001}, rank_of=lambda local: local, mark_hung=lambda ranks, why: None)
        run_context = cast("RunContext", context)
        self.hangs = hangs.HangMonitor(
            run_context,
            cast("Rendezvous", SimpleNamespace(idle=None, others_idle_s=None)),
            goodput=GoodputTracker(run_context, began_s=900.0),
            say=self.said.append,
            on_hang=lambda: self.ended.append(len(self.told)),
        )
        self.hangs.begin(cast("RankGroup", group), 0, whole=True)


@pytest.mark.parametrize("on_hang", ["stop", "report"])
def test_the_sidecar_has_heard_of_a_hang_before_anybody_is_ended_for_it(
    monkeypatch: pytest.MonkeyPatch, on_hang: str
) -> None:
    """By default a hang ends the job, within the second in which it would be told of by the way."""
    job = Job(monkeypatch, on_hang=on_hang)

    Watch.on_hang(replace(LATE, acts=True, rule="timeout", due_in_s=0.0))

    assert [run["hangs"] for run in job.told] == [1]
    assert job.ended == ([1] if on_hang == "stop" else [])
    assert job.hangs.times_s == ((1000.0, 1000.0) if on_hang == "stop" else None)


def test_a_standstill_is_told_with_what_follows_told_again_and_taken_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = Job(monkeypatch, where=str(tmp_path))
    (tmp_path / "hang.json").write_text('{"state": "told"}')

    Watch.on_late(LATE)
    Watch.on_late(replace(LATE, quiet_s=200.0, due_in_s=400.0))
    Watch.on_over((1,), 240.0)

    assert job.said == [
        f"{LATE.sentence}: no progress for 1 min 40 s; acts in 8 min 20 s; --hang-timeout",
        "the stacks of all ranks: attempts/0/hang.json",
        f"{LATE.sentence}: no progress for 3 min 20 s; acts in 6 min 40 s; --hang-timeout",
        "rank 1 moves again after 4 min 00 s",
    ]
    stall = {"ranks": [1], "since_s": 900.0, "due_s": 1500.0, "what": LATE.sentence}
    assert job.told[0]["stall"] == stall
    assert [(run["hang_suspicions"], run["hangs"]) for run in job.told] == [(1, 0)] * 3
    assert job.told[-1]["stall"] is None
    assert [what for what, _ in job.events] == ["hang_suspected", "hang_suspected", "hang_over"]
    assert json.loads((tmp_path / "hang.json").read_text())["state"] == "over"
    assert job.ended == []


@pytest.mark.parametrize(
    ("on_hang", "given", "said"),
    [
        ("report", {}, "no action will be taken (--on-hang report)"),
        ("restart", {"due_in_s": None}, "no action is taken: this may be normal"),
        ("restart", {"due_by": ""}, "acts in 8 min 20 s; the GIL is held without using the CPU"),
        ("restart", {"due_by": "--first-step-timeout"}, "acts in 8 min 20 s; --first-step-timeout"),
    ],
)
def test_what_is_told_says_what_will_be_done(
    monkeypatch: pytest.MonkeyPatch, on_hang: str, given: dict[str, Any], said: str
) -> None:
    job = Job(monkeypatch, on_hang=on_hang)

    Watch.on_late(replace(LATE, **given))

    assert job.said[0].endswith(f"; {said}")


def test_a_finished_program_that_is_stuck_in_its_teardown_has_lost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)

    Watch.on_hang(replace(LATE, acts=True, rule="teardown", quiet_s=50.0))

    assert job.hangs.finished
    assert job.hangs.times_s is not None
    cause_s, seen_s = job.hangs.times_s
    assert cause_s == seen_s, "the time until it is seen is its end's, and no detection"


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
    ("waits", "rule", "told"),
    [
        ("dist.recv(torch.zeros(1), src=1 - dist.get_rank())", "deadlock", "wait in recv"),
        ("dist.irecv(torch.zeros(1), src=1 - dist.get_rank()).wait()", "timeout", "wait in Work.wait"),
    ],
    ids=["recv", "irecv().wait"],
)
def test_ranks_that_wait_for_each_other_are_seen_as_such_through_the_profilers_taps(
    gpulaunch: Any, tmp_path: Path, waits: str, rule: str, told: str
) -> None:
    """What waits has no Python frame, and the last one above it is the tap of torch's Work.wait. That both receive is
    proof; of what they wait for in the same place, with no more known, it is told, until the timeout."""
    (tmp_path / "mutual.py").write_text(textwrap.dedent(MUTUAL).replace("{waits}", waits))
    options = ["--hang-timeout", "45", "--job-dir", tmp_path / "job"]

    ended = gpulaunch("--nproc", "2", *options, tmp_path / "mutual.py", timeout_s=400)

    assert ended.code == 124, ended
    lines = (tmp_path / "job/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    (hung,) = (event for event in events if event["event"] == "hung")
    assert hung["rule"] == rule
    assert told in hung["why"]
    assert rule == "deadlock" or any(event["event"] == "hang_suspected" for event in events)


RESTS = """
    import os
    import time
    import torch
    import torch.distributed as dist

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            for each in model.parameters():
                dist.all_reduce(each.grad)
            optimizer.step()

    def rest_until(name):
        while not os.path.exists(name):
            time.sleep(0.1)

    def ended():
        # Rank 0 says it to all: where each rank looks for itself, one may make a step more than the other.
        found = torch.tensor(float(os.path.exists("ends")))
        dist.broadcast(found, 0)
        return bool(found)

    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(40)
    if dist.get_rank() == 0:
        rest_until("moves")
    train(40)
    while not ended():
        train(1)
        time.sleep(0.05)
"""


class Told:
    """What a live job shows of a standstill: its metrics, its segment, `top`."""

    def __init__(self, gpulaunch: Any, run: Any) -> None:
        run.wait_for("/metrics")
        (self._url,) = re.findall(r"http://\S+/metrics", run.stderr)
        self._gpulaunch = gpulaunch

    def _fetch(self, url: str) -> str:
        with urllib.request.urlopen(url, timeout=60) as segment:
            return segment.read().decode()

    def stalled_s(self) -> dict[str, float]:
        found = re.findall(r'^gpulaunch_rank_stalled_seconds\{rank="(\d)"\} (\S+)$', self._fetch(self._url), re.M)
        return {rank: float(seconds) for rank, seconds in found}

    def stall(self) -> dict[str, Any] | None:
        return json.loads(self._fetch(self._url.replace("/metrics", "/api/run.json")))["stall"]

    def top(self) -> str:
        return self._gpulaunch("top", "--once", "job").stdout

    def until(self, holds: Callable[[], object], what: str) -> None:
        """The sidecar looks once a second or so."""
        until_s = time.monotonic() + 10.0
        while not holds():
            assert time.monotonic() < until_s, what
            time.sleep(0.1)


@pytest.mark.torch
@pytest.mark.light  # in a crowd the ranks are not at rest at once
def test_metrics_page_and_top_show_a_standstill_while_it_lasts_and_no_longer(gpulaunch: Any, tmp_path: Path) -> None:
    (tmp_path / "rests.py").write_text(textwrap.dedent(RESTS))
    run = gpulaunch.start("--nproc", "2", "--hang-timeout", "36", "--job-dir", tmp_path / "job", "rests.py")
    told = Told(gpulaunch, run)
    assert (told.stalled_s(), told.stall()) == ({}, None)

    run.wait_for("--hang-timeout")
    told.until(lambda: told.stalled_s() and told.stall(), "it is never shown")
    stalled_s, stall, shown = told.stalled_s(), told.stall(), told.top()
    (tmp_path / "moves").touch()
    run.wait_for("moves again")
    told.until(lambda: not told.stalled_s() and not told.stall(), "it is shown for ever")
    after = told.top()
    (tmp_path / "ends").touch()
    ended = run.wait()

    assert ended.code == 0, ended
    assert list(stalled_s) == ["0"], "rank 1 waits for it"
    assert stalled_s["0"] >= 18.0
    assert stall is not None
    assert re.fullmatch(r"rank 0 is in rests\.py:\d+ sleep\(\), rank 1 waits for it in all_reduce", stall["what"])
    assert stall["due_s"] - stall["since_s"] == pytest.approx(36.0, abs=1.0)
    assert f": {stall['what']}" in " ".join(shown.split())
    assert "no progress for" in shown
    assert "no progress for" not in after
