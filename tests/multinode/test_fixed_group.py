"""Nodes with fixed ranks, as under torchrun's `static`: one that is lost ends the job, and nothing less does."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from hosts import Host

from job import SILENCE_S, Job

pytestmark = [pytest.mark.root, pytest.mark.light]


def started(tmp_path: Path, hosts: list[Host]) -> Job:
    """A job that trains on all of them; node 0 comes last."""
    job = Job(tmp_path, str(len(hosts)), meets=("--master-addr", "host0", "--master-port", "29500", "--insecure"))
    for rank, host in reversed([*enumerate(hosts)]):
        job.start(host, arguments=("--node-rank", str(rank)))
    job.until_trains(*(host.name for host in hosts))
    return job


def test_a_fixed_group_restarts_and_outlives_a_flap(three: list[Host], tmp_path: Path) -> None:
    job = started(tmp_path, three)
    killed_s = time.monotonic()
    three[1].kill(job.nodes["host1"].rank_pid(), signal.SIGKILL)
    job.until_trains("host0", "host1", "host2", after_s=killed_s)

    three[2].cut()
    job.pause(5.0)
    three[2].heal()
    job.pause(4.0)
    for name in ("host1", "host0"):
        job.signal(name, signal.SIGSTOP)
        job.pause(5.0)
        job.signal(name, signal.SIGCONT)
        job.pause(4.0)

    assert {step["attempt"] for node in job.nodes.values() for step in node.steps()} == {0, 1}
    assert job.end() == {"host0": 0, "host1": 0, "host2": 0}


@pytest.mark.parametrize("name", ["host0", "host2"])
def test_a_fixed_group_ends_without_a_node(name: str, three: list[Host], tmp_path: Path) -> None:
    """On both sides of a cable that is cut, and its ranks are ended before the others could begin anew."""
    job = started(tmp_path, three)
    cut_s = time.monotonic()
    three[int(name[-1])].cut()

    assert job.codes() == {"host0": 75, "host1": 75, "host2": 75}
    assert time.monotonic() - cut_s < SILENCE_S
    lost = "node 0 (host0) is gone: " if name == "host0" else "node 2 (host2) is lost; "
    assert lost in job.nodes["host1"].said, job


def test_a_fixed_group_ends_when_the_agent_of_node_0_is_killed(three: list[Host], tmp_path: Path) -> None:
    job = started(tmp_path, three)
    killed_s = time.monotonic()
    job.signal("host0", signal.SIGKILL)

    assert job.codes("host1", "host2") == {"host1": 75, "host2": 75}
    assert time.monotonic() - killed_s < 6.0
    for name in ("host1", "host2"):
        assert "node 0 (host0) is gone: Connection refused" in job.nodes[name].said, job
