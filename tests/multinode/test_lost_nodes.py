"""Nodes that fail, fall silent, are powered off, come back and come late, on hosts of their own.

The times are upper bounds with room for a busy machine; what is usual is in docs/many-nodes.md.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from hosts import Host, hosts

from job import SILENCE_S, SOON, Job, alive
from needed import program

pytestmark = [pytest.mark.root, pytest.mark.light]


def test_a_rank_that_is_killed_on_another_node_restarts_all(three: list[Host], tmp_path: Path) -> None:
    job = Job(tmp_path, "3", *SOON)
    job.start(three[2], three[1], three[0])
    job.until_trains("host0", "host1", "host2")

    killed_s = time.monotonic()
    three[1].kill(job.nodes["host1"].rank_pid(), signal.SIGKILL)

    assert job.until_trains("host0", "host1", "host2", after_s=killed_s) - killed_s < 5.0
    assert job.end() == {"host0": 0, "host1": 0, "host2": 0}
    for node in job.nodes.values():
        assert "rank 1 (local rank 0, host1" in node.said
        assert "was killed by SIGKILL" in node.said


@pytest.mark.parametrize("how", ["cut", "power_off"])
def test_the_others_go_on_without_a_silent_node_and_take_it_back(how: str, three: list[Host], tmp_path: Path) -> None:
    job = Job(tmp_path, "2:3", *SOON)
    job.start(*three)
    job.until_trains("host0", "host1", "host2")

    gone_s = time.monotonic()
    getattr(three[2], how)()

    assert job.until_trains("host0", "host1", after_s=gone_s) - gone_s < SILENCE_S
    assert "node 2 (host2) is lost" in job.nodes["host0"].said
    assert "node 2 (host2) is lost" in job.nodes["host1"].said
    back_s = time.monotonic()
    three[2].heal()
    if how == "power_off":
        job.start(three[2])
    else:  # its own ranks were ended before the others went on
        assert "the leader has not answered for 7.5 s: the ranks here are ended" in job.nodes["host2"].said
    job.until_trains("host0", "host1", "host2", after_s=back_s)
    assert job.end() == {"host0": 0, "host1": 0, "host2": 0}


def test_a_flap_and_a_pause_of_five_seconds_change_nothing(three: list[Host], tmp_path: Path) -> None:
    job = Job(tmp_path, "2:3", *SOON)
    job.start(*three)
    job.until_trains("host0", "host1", "host2")
    three[2].cut()
    job.pause(5.0)
    three[2].heal()
    healed_s = time.monotonic()
    job.until_trains("host0", "host1", "host2", after_s=healed_s)
    for name in ("host1", "host0"):  # a node's agent, then the leader's
        job.signal(name, signal.SIGSTOP)
        job.pause(5.0)
        job.signal(name, signal.SIGCONT)
        job.pause(4.0)  # they hear each other again
    job.pause(6.0)

    assert {step["attempt"] for node in job.nodes.values() for step in node.steps()} == {0}
    assert job.end() == {"host0": 0, "host1": 0, "host2": 0}


def test_nodes_that_come_late_take_part_and_the_last_call_is_not_waited_out_again(
    three: list[Host], tmp_path: Path
) -> None:
    job = Job(tmp_path, "1:3", *SOON)
    job.start(three[1])  # the leader is not there yet
    job.pause(1.0)
    job.start(three[0])
    job.until_trains("host0", "host1")
    late_s = time.monotonic()
    job.start(three[2])

    job.until_trains("host0", "host1", "host2", after_s=late_s)
    assert job.end() == {"host0": 0, "host1": 0, "host2": 0}


def test_a_spare_takes_the_seat_of_a_node_that_is_lost(tmp_path: Path) -> None:
    with hosts(3) as three:
        job = Job(tmp_path, "2", *SOON)
        job.start(three[0], three[1])
        job.until_trains("host0", "host1")
        job.start(three[2])
        job.until(job.nodes["host2"].has_met, "host2 meets the others")
        job.pause(2.0)
        assert alive(job.nodes["host2"].process)

        gone_s = time.monotonic()
        three[1].power_off()

        assert job.until_trains("host0", "host2", after_s=gone_s) - gone_s < SILENCE_S
        assert {step["node_rank"] for step in job.nodes["host2"].steps()} == {1}
        assert job.end() | {"host1": 0} == {"host0": 0, "host1": 0, "host2": 0}


def test_the_agent_of_the_leader_comes_back(three: list[Host], tmp_path: Path) -> None:
    """Its ranks have died with it; the others wait for it, and all begin anew in a later generation. Its host says that
    the agent before is dead, so the nodes do not wait until it has been silent for long."""
    job = Job(tmp_path, "3", *SOON)
    job.start(*three)
    job.until_trains("host0", "host1", "host2")

    killed_s = time.monotonic()
    job.signal("host0", signal.SIGKILL)
    job.pause(2.0)
    job.start(three[0])

    trains_s = job.until_trains("host0", "host1", "host2", after_s=killed_s + 2.0)
    assert trains_s - killed_s - 2.0 < SILENCE_S
    assert job.end() == {"host0": 0, "host1": 0, "host2": 0}


def test_one_budget_and_one_exit_code(three: list[Host], tmp_path: Path) -> None:
    """A crash loop that moves over the nodes."""
    job = Job(tmp_path, "3", *SOON, "--max-restarts", "2")
    job.start(*three)
    for number in range(3):
        began_s = time.monotonic()
        job.until_trains("host0", "host1", "host2", after_s=began_s)
        job.nodes[f"host{number}"].order("exit 7")

    assert job.codes() == {"host0": 7, "host1": 7, "host2": 7}
    for node in job.nodes.values():
        assert "node 2 (host2): rank 2" in node.said or node.name == "host2"
        assert {step["attempt"] for step in node.steps()} == {0, 1, 2}


def test_an_agent_that_is_killed_is_lost_at_once(three: list[Host], tmp_path: Path) -> None:
    """Its host answers that it does not run any more: there is no silence to wait out."""
    job = Job(tmp_path, "2:3", *SOON)
    job.start(*three)
    job.until_trains("host0", "host1", "host2")

    killed_s = time.monotonic()
    job.signal("host1", signal.SIGKILL)

    assert job.until_trains("host0", "host2", after_s=killed_s) - killed_s < 6.0
    del job.nodes["host1"]
    assert job.end() == {"host0": 0, "host2": 0}


@pytest.mark.parametrize("how", ["power_off", "agent"])
def test_without_a_leader_the_others_end_to_be_run_again(how: str, three: list[Host], tmp_path: Path) -> None:
    job = Job(tmp_path, "2:3", "--rdzv-conf", "last_call_timeout=1,away_timeout=4")
    job.start(*three)
    job.until_trains("host0", "host1", "host2")

    if how == "power_off":
        three[0].power_off()
    else:
        job.signal("host0", signal.SIGKILL)

    assert job.codes("host1", "host2") == {"host1": 75, "host2": 75}
    for name in ("host1", "host2"):
        assert "waited 4 s for the leader (host0) at host0:29400: " in job.nodes[name].said


def test_a_fifth_of_the_packets_is_lost(three: list[Host], tmp_path: Path) -> None:
    """And nothing happens, for half a minute."""
    program("iptables", package="iptables")
    job = Job(tmp_path, "2:3", *SOON)
    job.start(*three)
    job.until_trains("host0", "host1", "host2")
    for host in three:
        host.lose(0.2)
    job.pause(30.0)
    for host in three:
        host.clear_rules()

    job.until_trains("host0", "host1", "host2", after_s=time.monotonic())
    assert {step["attempt"] for node in job.nodes.values() for step in node.steps()} == {0}
    assert job.end() == {"host0": 0, "host1": 0, "host2": 0}


@pytest.mark.parametrize("chain", ["INPUT", "OUTPUT"])
def test_a_link_that_works_in_one_direction_only(chain: str, three: list[Host], tmp_path: Path) -> None:
    """The node hears the leader and is not heard, or the other way round: it is fenced either way."""
    program("iptables", package="iptables")
    job = Job(tmp_path, "2:3", *SOON)
    job.start(*three)
    job.until_trains("host0", "host1", "host2")

    half_s = time.monotonic()
    three[2].black_hole(chain)

    assert job.until_trains("host0", "host1", after_s=half_s) - half_s < SILENCE_S
    alone = [step["at_s"] for step in job.nodes["host2"].steps()]
    assert max(alone) - half_s < 9.0
    back_s = time.monotonic()
    three[2].clear_rules()
    job.until_trains("host0", "host1", "host2", after_s=back_s)
    assert job.end() == {"host0": 0, "host1": 0, "host2": 0}


def test_a_spare_ends_with_the_job(three: list[Host], tmp_path: Path) -> None:
    for order, codes in (("end", 0), ("exit 7", 7)):
        (directory := tmp_path / str(codes)).mkdir()
        job = Job(directory, "2", *SOON, "--max-restarts", "0")
        job.start(three[0], three[1])
        job.until_trains("host0", "host1")
        job.start(three[2])
        job.until(job.nodes["host2"].has_met, "host2 meets the others")
        job.pause(2.0)
        job.nodes["host1"].order(order)

        assert job.codes() == dict.fromkeys(("host0", "host1", "host2"), codes)


def test_nodes_that_do_not_come_and_a_pause_that_is_longer_than_the_wait_for_them(
    three: list[Host], tmp_path: Path
) -> None:
    job = Job(tmp_path, "2", "--rdzv-conf", "join_timeout=3")
    job.start(three[0])
    assert job.codes() == {"host0": 75}

    job.start(three[0], three[1])
    for _ in range(4):
        began_s = time.monotonic()
        job.until_trains("host0", "host1", after_s=began_s)
        job.nodes["host1"].order("exit 7")
    began_s = time.monotonic()
    job.until_trains("host0", "host1", after_s=began_s)  # after a pause of 4 s
    assert job.end() == {"host0": 0, "host1": 0}


def test_ctrl_c_at_the_leader_ends_the_job_everywhere(three: list[Host], tmp_path: Path) -> None:
    job = Job(tmp_path, "2:3", *SOON)
    job.start(*three)
    job.until_trains("host0", "host1", "host2")
    asked_s = time.monotonic()
    job.signal("host0", signal.SIGINT)

    assert job.codes() == {"host0": 130, "host1": 130, "host2": 130}
    assert time.monotonic() - asked_s < 8.0
