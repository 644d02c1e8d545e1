"""The ranks of one attempt, where the fork server's answer and the end of the attempt cross."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpulaunch.launcher.agent.cleanup import LeftoverPolicy
from gpulaunch.launcher.agent.rank_group import GroupEvents, RankGroup
from gpulaunch.launcher.loop import linux
from gpulaunch.launcher.loop.forkserver import Started
from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.launcher.rendezvous.base import World


def cleared_group() -> tuple[RankGroup, list[str], Loop]:
    """A group that was cleared before anything of it had been started, and what it has called back."""
    group, events, loop = group_being_cleared(LeftoverPolicy.KILL)
    for _ in range(10):
        if not events:
            loop.turn(1.0)
    return group, events, loop


def group_being_cleared(how: LeftoverPolicy) -> tuple[RankGroup, list[str], Loop]:
    """A group that has begun to be cleared."""
    group, events, loop = new_group()
    group.clear(frozenset(), how)
    return group, events, loop


def new_group() -> tuple[RankGroup, list[str], Loop]:
    """A group without ranks yet, what it has called back, and the loop that it waits in."""
    events: list[str] = []

    def note(what: str) -> Any:
        return lambda *_: events.append(what)

    loop = Loop()
    context = SimpleNamespace(
        loop=loop,
        base_env={"GPULAUNCH_RUN_ID": "r"},
        foreign_children=True,
        oom=SimpleNamespace(watch=note("watched")),
    )
    group = RankGroup(
        cast("Any", context),
        World(
            attempt=0,
            nnodes=1,
            node_rank=0,
            first_rank=0,
            world_size=2,
            master_addr="127.0.0.1",
            master_port=0,
            store_fd=None,
        ),
        GroupEvents(
            started=note("started"),
            start_failed=note("start failed"),
            rank_ended=note("rank ended"),
            cleared=note("cleared"),
            started_again=note("started again"),
            store_lost=note("store lost"),
            left_running=note("left running"),
        ),
        agent_store=True,
    )
    return group, events, loop


def test_an_answer_after_the_attempt_was_cleared_is_not_taken_up() -> None:
    """A launcher that was told to end before the answer came has reaped these ranks; it ended with 70. No torch."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    group, events, loop = cleared_group()
    try:
        group.adopt(Started(pids=(ended.pid, ended.pid), store_pid=ended.pid, error=""))

        assert (events, group.live, group.store_pid) == (["cleared"], {}, None)
    finally:
        loop.close()


def test_ranks_forked_after_the_attempt_was_cleared_are_killed() -> None:
    """They were under the fork server when the launcher looked for what is left. No torch."""
    late = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    group, events, loop = cleared_group()
    try:
        group.adopt(Started(pids=(late.pid,), store_pid=None, error=""))

        assert late.wait(30) == -signal.SIGKILL
        assert (events, group.live) == (["cleared"], {})
    finally:
        loop.close()


@pytest.mark.parametrize("how", LeftoverPolicy)
def test_a_store_that_is_announced_while_the_ranks_are_cleared_is_ended_and_not_a_leftover(how: LeftoverPolicy) -> None:
    """With `--leftovers wait` the launcher of ranks that were spawned and ended at once waited for its own store."""
    group, events, loop = group_being_cleared(how)
    mark = {linux.RUNS_VARIABLE: "r"}
    store = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], env=mark)
    try:
        group.adopt(Started(pids=(), store_pid=store.pid, error=""))
        until_s = loop.now() + 30
        while not events and loop.now() < until_s:
            loop.turn(1.0)

        assert (events, group.store_pid) == (["cleared"], None)
    finally:
        store.kill()
        store.wait()
        loop.close()


def test_a_store_that_is_announced_while_ranks_end_does_not_end_them() -> None:
    """Spawned ranks start before the store: one interrupted early was killed in its traceback, its files unwritten."""
    source = "import signal, sys, time\nsignal.signal(15, lambda *_: (time.sleep(1), sys.exit(3)))\nprint(flush=True)"
    rank = subprocess.Popen([sys.executable, "-S", "-c", source + "\ntime.sleep(600)"], stdout=subprocess.PIPE)
    store = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    group, _, loop = new_group()
    try:
        assert rank.stdout
        assert rank.stdout.read(1) == b"\n"
        group.adopt(Started(pids=(rank.pid,), store_pid=None, error=""))
        group.stop(signal.SIGTERM)
        group.adopt(Started(pids=(), store_pid=store.pid, error=""))

        assert rank.wait(30) == 3
    finally:
        for process in (rank, store):
            process.kill()
            process.communicate()
        loop.close()
