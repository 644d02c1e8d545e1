"""`gpulaunch chaos` on a toy run: a rank that counts, and an agent that holds its directory. No torch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpulaunch.launcher.chaos.faults import Verb
from gpulaunch.launcher.cli import chaos, main

# Counts into its file, and keeps a little more memory with each turn.
RANK = """
import sys, time
kept = []
with open(sys.argv[1], "ab", buffering=0) as count:
    while True:
        try:
            kept.append(bytearray(1 << 20))
        except MemoryError:
            count.write(b"!")
            sys.exit(9)
        count.write(b".")
        time.sleep(0.005)
"""
AGENT = "import os, sys, time\nfd = os.open(sys.argv[1], os.O_RDONLY)\nprint('held', flush=True)\ntime.sleep(600)"


@dataclass
class Toy:
    """One rank, one agent, and what the agent would have written."""

    run_dir: Path
    rank: subprocess.Popen[bytes]
    agent: subprocess.Popen[bytes]

    def count(self) -> int:
        return (self.run_dir / "count").stat().st_size

    def wait_for_count(self, more: int) -> None:
        until_s, start = time.monotonic() + 60, self.count()
        while self.count() < start + more:
            assert time.monotonic() < until_s, "the rank does not count"
            time.sleep(0.005)

    def state(self) -> str:
        return Path(f"/proc/{self.rank.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def wait_for_state(self, state: str) -> None:
        until_s = time.monotonic() + 60
        while self.state() != state:
            assert time.monotonic() < until_s, f"the rank is never in state {state}"
            time.sleep(0.005)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    run_dir = tmp_path / "gpulaunch-runs" / "toy"
    run_dir.mkdir(parents=True)
    (run_dir / "events.jsonl").touch()
    (run_dir / "count").touch()
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(run_dir)], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    agent.stdout.readline()
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(run_dir / "count")], env={**os.environ, "GPULAUNCH_RUNS": "ab"}
    )
    group = {
        "version": 1,
        "run_id": "ab",
        "attempt": 2,
        "ranks": [{"rank": 1, "local_rank": 0, "pid": rank.pid}],
        "agent_pid": agent.pid,
        "checkpoint_dirs": [str(run_dir / "checkpoints")],
    }
    (run_dir / "group.json").write_text(json.dumps(group))
    monkeypatch.chdir(tmp_path)
    toy = Toy(run_dir, rank, agent)
    yield toy
    for process in (rank, agent):
        process.kill()
        process.communicate()


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_killed_rank_is_told_with_pid_and_time(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.run(["kill-rank", "1", "--seed", "5"]) == 0

    assert toy.rank.wait() == -signal.SIGKILL
    (line,) = lines(capsys)
    assert re.fullmatch(rf"\d\d:\d\d:\d\d kill-rank: SIGKILL to rank 1, pid {toy.rank.pid} \(attempt 2, seed 5\)", line)
    event = json.loads((toy.run_dir / "events.jsonl").read_text())
    assert (event["event"], event["fault"], event["pid"]) == ("chaos", "kill-rank", toy.rank.pid)


def test_any_signal(toy: Toy) -> None:
    assert chaos.run(["kill-rank", "any", "--signal", "segv"]) == 0

    assert toy.rank.wait() == -signal.SIGSEGV


def test_a_hung_rank_stays_stopped(toy: Toy) -> None:
    toy.wait_for_count(1)
    assert chaos.run(["hang-rank", "1"]) == 0

    toy.wait_for_state("T")


def test_a_starved_rank_fails_at_its_next_allocation_and_not_before(toy: Toy) -> None:
    toy.wait_for_count(1)
    assert chaos.run(["oom-rank", "1"]) == 0

    assert toy.rank.wait() == 9
    assert (toy.run_dir / "count").read_bytes().endswith(b"!")


def test_a_slowed_rank_is_slower_and_goes_on_afterwards(toy: Toy) -> None:
    toy.wait_for_count(5)
    started_s, before = time.monotonic(), toy.count()
    assert chaos.run(["slow-rank", "1", "--factor", "10", "--for", "1s"]) == 0
    slow = (toy.count() - before) / (time.monotonic() - started_s)
    started_s, before = time.monotonic(), toy.count()
    toy.wait_for_count(100)
    fast = (toy.count() - before) / (time.monotonic() - started_s)

    assert slow < fast / 2
    assert toy.state() in "SR"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_slowed_rank_goes_on_when_the_command_is_interrupted(toy: Toy, signum: int) -> None:
    command = [sys.executable, "-m", "gpulaunch.launcher.cli.main", "chaos", "slow-rank", "1"]
    command += ["--factor", "1000", "--for", "10m"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        toy.wait_for_state("T")
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()

    assert process.returncode == 128 + signum, err
    assert out.count(b"slowed rank 1") == 1
    toy.wait_for_count(20)


def test_a_slowed_rank_that_ends_is_not_waited_for(toy: Toy) -> None:
    toy.rank.send_signal(signal.SIGSTOP)
    toy.wait_for_state("T")
    command = [sys.executable, "-m", "gpulaunch.launcher.cli.main", "chaos", "slow-rank", "1", "--for", "10m"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        toy.wait_for_count(1)  # it was continued: the command is at work
        toy.rank.kill()
        toy.rank.wait()
        process.communicate(timeout=60)
    finally:
        process.kill()

    assert process.returncode == 0


def test_a_fault_comes_again_and_again_until_the_run_ends(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.run(["kill-rank", "1", "--signal", "CONT", "--every", "20ms", "--times", "3", "--seed", "1"]) == 0
    assert [line.endswith("(attempt 2, seed 1)") for line in lines(capsys)] == [True] * 3

    command = [sys.executable, "-m", "gpulaunch.launcher.cli.main", "chaos", "kill-rank", "1"]
    process = subprocess.Popen([*command, "--signal", "CONT", "--every", "10ms"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        toy.agent.kill()
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "the run has ended" in out.splitlines()[-1]


def test_the_agent_itself(toy: Toy) -> None:
    assert chaos.run(["kill-agent"]) == 0

    assert toy.agent.wait() == -signal.SIGKILL


def test_random_faults_are_those_of_the_seed(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["random", "--faults", "kill-sidecar,kill-store,kill-fork-server", "--every", "1ms", "--times", "6"]
    said: list[list[str]] = []
    for seed in ("1", "1", "2"):
        assert chaos.run([*words, "--seed", seed]) == 1  # the toy has none of them
        said.append([line[9:] for line in lines(capsys)])

    assert said[0] == said[1] != said[2]


def test_a_rank_that_is_just_being_restarted_is_waited_for(toy: Toy) -> None:
    toy.rank.kill()
    toy.rank.wait()
    command = [sys.executable, "-m", "gpulaunch.launcher.cli.main", "chaos", "kill-rank", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    again = subprocess.Popen(
        [sys.executable, "-c", RANK, str(toy.run_dir / "count")], env={**os.environ, "GPULAUNCH_RUNS": "ab"}
    )
    group = json.loads((toy.run_dir / "group.json").read_text())
    group["attempt"], group["ranks"][0]["pid"] = 3, again.pid
    (toy.run_dir / "new").write_text(json.dumps(group))
    try:
        (toy.run_dir / "new").rename(toy.run_dir / "group.json")
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        again.kill()

    assert again.wait() == -signal.SIGKILL
    assert f"rank 1, pid {again.pid} (attempt 3" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("kill-rnak 1", "chaos: unknown fault kill-rnak; did you mean kill-rank?"),
        ("kill-rank", "chaos: the following arguments are required: rank"),
        ("kill-rank one", "chaos: argument rank: expected a rank from 0, or `any`, got 'one'"),
        (
            "kill-rank 1 --after soon",
            "chaos: argument --after: expected a time such as 250ms, 30s, 2m or 0.5, got 'soon'",
        ),
        ("kill-rank 1 --signal SIGKIL", "chaos: argument --signal: unknown signal SIGKIL; did you mean SIGKILL?"),
        ("kill-rank 1 --evry 3s", "chaos: unknown argument --evry; did you mean --every?"),
        ("kill-rank 1 --times 3", "chaos: --times requires --every"),
        ("kill-rank 1 --times 0", "chaos: argument --times: expected a number from 1, got '0'"),
        (
            "slow-rank 1 --factor 1",
            "chaos: argument --factor: expected a number greater than 1 and at most 1000, got '1'",
        ),
        ("random --faults kill-rank,x", "chaos: argument --faults: unknown fault x"),
        ("kill-store", "chaos: no run is active in"),
        ("kill-store --job-dir nowhere", "chaos: there is no run directory nowhere"),
    ],
)
def test_wrong_words_are_one_line_and_exit_2(
    words: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main.main(["chaos", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"gpulaunch: error: {line}")


@pytest.mark.parametrize("words", [[], ["help"], ["--help"], ["kill-rank", "-h"]])
def test_the_help_has_every_fault(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.run(words) == 0

    said = capsys.readouterr().out
    assert [verb.value for verb in Verb if verb.value not in said] == []


def test_a_rank_of_another_node(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.run(["kill-rank", "7"]) == 1

    assert "rank 7 is not on this node; its ranks are 1" in lines(capsys)[0]
