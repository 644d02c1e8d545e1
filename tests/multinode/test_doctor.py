"""`gpulaunch doctor --rdzv-endpoint` names the hop that fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import Host, hosts

from job import PORT, Job

pytestmark = [pytest.mark.root, pytest.mark.light]


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with hosts(2) as two:
        yield two


@pytest.fixture
def ask(tmp_path: Path, two: list[Host]) -> Callable[..., tuple[int, str]]:
    """Ask the doctor on host1; its exit code and what it says."""

    def ask(*arguments: str) -> tuple[int, str]:
        output = tmp_path / "doctor.out"
        output.unlink(missing_ok=True)
        argv = [str(Path(sys.executable).with_name("gpulaunch")), "doctor", *arguments]
        process = two[1].run(argv, env=os.environ, cwd=tmp_path, output=output)
        return process.wait(timeout=60), output.read_text()

    return ask


def test_the_hop_that_fails(two: list[Host], tmp_path: Path, ask: Callable[..., tuple[int, str]]) -> None:
    endpoint = ("--rdzv-endpoint", f"host0:{PORT}")
    secret, other = tmp_path / "token", tmp_path / "other"
    secret.write_text("a secret that all nodes share")
    other.write_text("a secret that no other node has")

    code, said = ask("--rdzv-endpoint", f"no-such-host:{PORT}")
    assert (code, "no-such-host does not resolve" in said) == (1, True), said
    code, said = ask(*endpoint)
    assert (code, f"host0:{PORT} refuses: nothing listens there" in said) == (0, True), said
    code, said = ask("--rdzv-endpoint", f"host1:{PORT}")
    assert (code, "is free: an agent that starts here leads" in said) == (0, True), said

    job = Job(tmp_path, "1:2", "--rdzv-conf", "last_call_timeout=1", "--token-file", str(secret))
    job.start(two[0])
    job.until_trains("host0")
    code, said = ask(*endpoint, "--token-file", str(secret))
    assert (code, "and has the same token" in said) == (0, True), said
    assert "from 10.77.0.11 (eth0)" in said
    code, said = ask(*endpoint, "--token-file", str(other))
    assert (code, "has another token" in said) == (1, True), said
    code, said = ask(*endpoint)
    assert (code, "asks for a token" in said) == (1, True), said
    two[0].cut()
    code, said = ask(*endpoint)
    assert code == 1, said
    assert "does not answer" in said or "cannot be reached" in said
    two[0].heal()
    assert job.end() == {"host0": 0}
    assert {step["attempt"] for step in job.nodes["host0"].steps()} == {0}, "nobody who asks takes part"
