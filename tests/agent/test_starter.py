"""A fork server that cannot be started, or dies at once, costs the warm start and never the job."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpulaunch.launcher.agent import starter
from gpulaunch.launcher.agent.run_context import RunContext
from gpulaunch.launcher.agent.starter import Starter, StarterEvents
from gpulaunch.launcher.job.imports import Reading
from gpulaunch.launcher.loop import child, linux
from gpulaunch.launcher.loop.loop import Loop


class Group:
    """Stands for an attempt: notes how it was started."""

    def __init__(self, *, agent_store: bool) -> None:
        self.agent_store = agent_store
        self.asked = False
        self.live: dict[int, int] = {}
        self.awaits_store = True
        self.how: list[str] = []

    def start_spawned(self) -> None:
        if not self.asked:
            self.asked = True
            self.how.append(f"spawned, agent_store={self.agent_store}")

    def start_forked(self, server: object) -> None:
        self.how.append("forked")


def started_with(monkeypatch: pytest.MonkeyPatch, start: Any, *, before: bool) -> tuple[list[str], list[str]]:
    """How the ranks were started, and what was said; `before`: the fork server comes before the first attempt."""
    monkeypatch.setattr(child, "start", start)
    monkeypatch.setattr(starter.packages, "recall", lambda *_: {})
    monkeypatch.setattr(starter.plan, "rank_environment", lambda *_, **__: {})
    loop, said = Loop(), cast("list[str]", [])
    context = SimpleNamespace(
        spec=SimpleNamespace(),
        loop=loop,
        use_agent_store=True,
        base_env={},
        fork_server=None,
        rundir=SimpleNamespace(event=lambda *_, **__: None),
    )
    its = Starter(
        cast("RunContext", context),
        say=said.append,
        reading=Reading(),
        spawn_because="",
        events=StarterEvents(start_failed=lambda *_: None, no_store=lambda *_: None),
        on_pid=lambda: None,
    )
    try:
        if before:
            its.start_server()
        group = Group(agent_store=its.agent_store)
        its.start(cast("Any", group))
        until = time.monotonic() + 60
        while not group.how and time.monotonic() < until:
            loop.turn(1.0)
    finally:
        its.close()
        loop.close()
    return group.how, said


@pytest.mark.parametrize("before", [True, False])
def test_a_fork_server_that_is_dead_before_it_is_spoken_to(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    """The first message meets a closed socket: the death counts like a later one, and the ranks are spawned."""
    real = child.start

    def start(argv: list[str], env: Mapping[str, str], **how: Any) -> int:
        pid = real([sys.executable, "-S", "-c", "pass"], env, **how)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return pid

    how, said = started_with(monkeypatch, start, before=before)

    assert how == ["spawned, agent_store=False"]
    assert said == ["ranks are spawned, not forked: the fork server died 3 times"]


@pytest.mark.parametrize("before", [True, False])
def test_a_fork_server_that_cannot_be_executed(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    def start(*_: Any, **__: Any) -> int:
        raise OSError(11, "Resource temporarily unavailable")

    how, said = started_with(monkeypatch, start, before=before)

    assert how == ["spawned, agent_store=False"]
    assert len(said) == 1
    assert "cannot be started: Resource temporarily unavailable" in said[0]


@pytest.mark.torch
def test_where_the_fork_server_always_dies_ranks_are_spawned_and_host_their_store(
    gpulaunch: Any, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import datetime, os, torch.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=60))\n"
        "print('STORE OF THE AGENT', os.environ['TORCHELASTIC_USE_AGENT_STORE'], flush=True)\n"
    )
    run = gpulaunch.start("--nproc", "2", "--no-profile", program)
    killed: set[int] = set()
    until_s = time.monotonic() + 60.0
    while "ranks are spawned" not in run.stderr and time.monotonic() < until_s:
        for pid in set(linux.children_of(run.pid)) - killed:
            with contextlib.suppress(OSError):
                if b"forkserver_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        time.sleep(0.01)
    ended = run.wait()

    assert ended.code == 0, ended
    assert ended.stdout.count("STORE OF THE AGENT False") == 2
    assert "ranks are spawned, not forked: the fork server died 3 times" in ended.stderr
