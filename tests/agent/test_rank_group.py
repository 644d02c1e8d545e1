"""The ranks of one attempt, where the fork server's answer and the end of the attempt cross."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

from gpulaunch.launcher.agent.cleanup import LeftoverPolicy
from gpulaunch.launcher.agent.rank_group import GroupEvents, RankGroup
from gpulaunch.launcher.loop.forkserver import Started
from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.launcher.rendezvous.base import World


def test_an_answer_after_the_attempt_was_cleared_is_of_nobody() -> None:
    """A launcher that was told to end before the answer came has reaped these ranks; it ended with 70. No torch."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    events: list[str] = []

    def note(what: str) -> Any:
        return lambda *_: events.append(what)

    loop = Loop()
    try:
        group = RankGroup(
            cast("Any", SimpleNamespace(loop=loop, base_env={"GPULAUNCH_RUN_ID": "r"}, foreign_children=True)),
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
        group.clear(frozenset(), LeftoverPolicy.KILL)
        for _ in range(10):
            if not events:
                loop.turn(1.0)

        group.adopt(Started(pids=(ended.pid, ended.pid), store_pid=ended.pid, error=""))

        assert (events, group.live, group.store_pid) == (["cleared"], {}, None)
    finally:
        loop.close()
