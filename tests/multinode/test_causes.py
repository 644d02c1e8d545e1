"""What is said of a failure on the nodes where it did not happen, and what is done there."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
from hosts import Host

from job import SOON, Job

pytestmark = [pytest.mark.root, pytest.mark.light]


@pytest.mark.parametrize("order", ["raise", "linger 4"])
def test_every_node_knows_the_exception_and_its_host(order: str, three: list[Host], tmp_path: Path) -> None:
    """Also where the ranks of the others had seen their connections close seconds before that rank has ended."""
    job = Job(tmp_path, "3", *SOON, "--max-restarts", "1")
    job.start(*three, PYTHON_EXEC=sys.executable)  # with our handler of exceptions in it
    for attempt in range(2):
        began_s = time.monotonic()
        job.until_trains("host0", "host1", "host2", after_s=began_s)
        job.nodes["host1"].order(order)
        if attempt == 0:
            job.until(lambda: "(restart 1 of 1)" in job.nodes["host2"].said, "they restart")
    assert set(job.codes().values()) == {1}

    for attempt in range(2):
        causes = job.first_causes(attempt)
        assert set(causes) == {"host0", "host1", "host2"}
        for headline in causes.values():
            assert "rank 1 (local rank 0, host1, pid" in headline
            assert "raised ValueError: the loss is not finite" in headline
    for name in ("host0", "host2"):
        said = job.nodes[name].said
        assert "attempt 0 failed: node 1 (host1): rank 1" in said
        assert "first cause, on another node: node 1 (host1): rank 1" in said
        assert "gave up" not in said
        assert "not restarted: all 1 restarts allowed by --max-restarts are used" in said


def test_a_node_that_is_asked_to_end_leaves_and_the_others_go_on(three: list[Host], tmp_path: Path) -> None:
    job = Job(tmp_path, "2:3", *SOON, "--max-restarts", "0")
    job.start(*three)
    job.until_trains("host0", "host1", "host2")

    asked_s = time.monotonic()
    job.signal("host2", signal.SIGTERM)

    assert job.codes("host2") == {"host2": 143}
    assert job.until_trains("host0", "host1", after_s=asked_s) - asked_s < 8.0
    assert "node 2 (host2): asked to end by SIGTERM" in job.nodes["host0"].said
    del job.nodes["host2"]
    assert job.end() == {"host0": 0, "host1": 0}


def test_all_save_with_a_node_that_is_asked_to_save_and_leave(three: list[Host], tmp_path: Path) -> None:
    job = Job(tmp_path, "2:3", *SOON, "--preempt-signals", "SIGTERM")
    job.start(*three, SAVED="75")
    job.until_trains("host0", "host1", "host2")

    asked_s = time.monotonic()
    job.signal("host2", signal.SIGTERM)

    assert job.codes("host2") == {"host2": 75}
    assert job.until_trains("host0", "host1", after_s=asked_s) - asked_s < 8.0
    for name in ("host0", "host1"):
        assert "the ranks of this node also save, and continue without it" in job.nodes[name].said
    # There are not enough for another: all save, and the job ends to be run again.
    job.signal("host1", signal.SIGTERM)
    assert job.codes() == {"host0": 75, "host1": 75, "host2": 75}


def test_the_job_ends_with_the_leader_that_is_asked_to_save(three: list[Host], tmp_path: Path) -> None:
    job = Job(tmp_path, "2:3", *SOON)
    job.start(*three, SAVED="75")
    job.until_trains("host0", "host1", "host2")

    job.signal("host0", signal.SIGTERM)

    assert job.codes() == {"host0": 75, "host1": 75, "host2": 75}
    for name in ("host1", "host2"):
        assert (
            "node 0 (host0): asked to end by SIGTERM: asked the ranks of this node to save and end"
            in job.nodes[name].said
        )
