"""What comes to the control port from elsewhere, while a job of two hosts trains."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hosts import Host, hosts

from job import PORT, SOON, Job

pytestmark = [pytest.mark.root, pytest.mark.light]

REGISTER = {"gpulaunch": 3, "say": "register", "run_id": "job", "min_nodes": 2, "max_nodes": 2, "max_restarts": 5}
REPORT = {
    "gpulaunch": 3,
    "say": "reported",
    "report": {"node": "f" * 16, "host": "forged", "nproc": 1, "state": "ended", "generation": 1, "order": 0},
}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("a secret that all nodes share\n")
    return path


def from_host(host: Host, tmp_path: Path, body: str) -> str:
    """Run Python code on a host that has `sock`, connected to the control port."""
    code = f"import socket, time\nsock = socket.create_connection(('10.77.0.10', {PORT}), timeout=20)\n"
    output = tmp_path / "stranger.out"
    process = host.run([sys.executable, "-c", code + textwrap.dedent(body)], env={}, cwd=tmp_path, output=output)
    process.wait(timeout=60)
    return output.read_text()


def attempts(job: Job) -> set[int]:
    return {step["attempt"] for node in job.nodes.values() for step in node.steps()}


def test_a_forged_node_neither_takes_a_seat_nor_ends_anything(three: list[Host], tmp_path: Path, secret: Path) -> None:
    job = Job(tmp_path, "2", *SOON, "--token-file", str(secret))
    job.start(three[0], three[1])
    job.until_trains("host0", "host1")
    lines = json.dumps(REGISTER) + "\n" + json.dumps(REPORT) + "\n"

    heard = from_host(three[2], tmp_path, f"sock.sendall({lines!r}.encode())\nprint(sock.makefile().read())")

    assert "challenge" in heard
    assert "planned" not in heard
    job.until_trains("host0", "host1", after_s=time.monotonic())
    assert attempts(job) == {0}
    assert "refused: 10.77.0.12 gives no token; give --token-file on every node" in job.nodes["host0"].said
    assert job.end() == {"host0": 0, "host1": 0}


@pytest.mark.parametrize(
    ("given", "says"),
    [("another secret of enough bytes\n", "has another token"), ("", "asks for a token")],
)
def test_a_node_with_another_token_or_none_is_told_so(
    three: list[Host], tmp_path: Path, secret: Path, given: str, says: str
) -> None:
    other = tmp_path / "other"
    other.write_text(given)
    job = Job(tmp_path, "1:2", "--rdzv-conf", "last_call_timeout=1,join_timeout=4")
    job.start(three[0], arguments=("--token-file", str(secret)))
    job.until_trains("host0")
    job.start(three[1], arguments=("--token-file", str(other)) if given else ())

    assert job.codes("host1") == {"host1": 1}
    assert f"what answers there {says}" in job.nodes["host1"].said
    assert ("WARNING: anyone who can connect to host0:29400" in job.nodes["host1"].said) is not bool(given)
    assert attempts(job) == {0}
    del job.nodes["host1"]
    assert job.end() == {"host0": 0}


def test_garbage_slow_and_endless_lines_change_nothing(three: list[Host], tmp_path: Path) -> None:
    """Without a token, too; and those that connect and say nothing keep no node out."""
    job = Job(tmp_path, "2:3", *SOON, "--insecure")
    job.start(three[0])
    job.start(three[1])
    job.until_trains("host0", "host1")
    from_host(three[2], tmp_path, "sock.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n')\nsock.recv(100)")
    from_host(three[2], tmp_path, "sock.sendall(b'{' + b'a' * 1000000)\nsock.recv(100)")
    from_host(
        three[2],
        tmp_path,
        """
        many = [socket.create_connection(sock.getpeername()) for _ in range(200)]
        for one in many:
            one.sendall(b'{')
        time.sleep(1)
        """,
    )
    job.start(three[2])
    job.until_trains("host0", "host1", "host2")

    said = job.nodes["host0"].said
    assert said.count("refused: what connected from 10.77.0.12 is not gpulaunch") == 1
    assert "WARNING" not in said
    assert job.end() == {"host0": 0, "host1": 0, "host2": 0}


def test_names_that_mean_127_0_1_1_as_debian_writes_them(tmp_path: Path) -> None:
    with hosts(2, debian_names=True) as (one, two):
        job = Job(tmp_path, "2", *SOON)
        job.start(two, one)
        job.until_trains("host0", "host1")

        assert {step["store"].partition(":")[0] for step in job.nodes["host1"].steps()} == {"10.77.0.10"}
        assert job.end() == {"host0": 0, "host1": 0}


def test_two_jobs_on_the_same_hosts_and_a_third_that_meets_at_their_port(three: list[Host], tmp_path: Path) -> None:
    jobs: list[Job] = []
    for number in range(2):
        (directory := tmp_path / str(number)).mkdir()
        jobs.append(Job(directory, "2", *SOON, "--rdzv-endpoint", f"host0:{PORT + number}"))
        jobs[-1].start(three[0], three[1])
    for job in jobs:
        job.until_trains("host0", "host1")
    (directory := tmp_path / "third").mkdir()
    stray = Job(directory, "2", *SOON, "--rdzv-id", "another")
    stray.start(three[2])

    assert stray.codes() == {"host2": 1}
    assert "belongs to run 'another', the leader (host0) to 'job'; check --rdzv-id" in stray.nodes["host2"].said
    for job in jobs:
        assert attempts(job) == {0}
        assert job.end() == {"host0": 0, "host1": 0}
