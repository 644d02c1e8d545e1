"""Traces of real jobs: torch's own client, in ranks that were forked after torch was loaded and in spawned ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = Path(__file__).with_name("train_traced.py")


def begin(gpulaunch, *args: str, words: tuple[str, ...] = ()):
    """A job of two ranks that trains."""
    run = gpulaunch.start("--nproc", "2", *args, TRAIN, *words)
    run.wait_until(lambda run: run.stdout.count("training") == 2)
    return run


def end(gpulaunch, run) -> str:
    """Let the job end by itself; what it said on stderr."""
    (gpulaunch.cwd / "stop").touch()
    ended = run.wait()
    assert ended.code == 0, ended
    assert ended.stdout.count("trained ") == 2
    return ended.stderr


def events_of(path: Path) -> list[dict]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


def rank_of(path: Path) -> dict:
    """What is written beside a trace about it."""
    (rank,) = [
        each for each in json.loads(path.with_name("trace.json").read_text())["ranks"] if each["path"] == str(path)
    ]
    return rank


@pytest.mark.torch
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_two_ranks_are_traced_together_and_train_on(gpulaunch, start_method: str) -> None:
    run = begin(gpulaunch, "--start-method", start_method, words=("fork",))

    traced = gpulaunch("trace", "--steps", "5", timeout_s=180)
    assert traced.code == 0, traced

    paths = sorted(traced.run_dir.glob("traces/*/rank-*.json"))
    assert [path.name for path in paths] == ["rank-0.json", "rank-1.json"]
    spans: list[tuple[float, float]] = []
    for path in paths:
        events = events_of(path)
        whole = rank_of(path)["num_steps"]
        assert whole > 0
        assert sum(event["name"] == "aten::addmm" for event in events) >= 2 * whole  # two layers in each step
        assert any("Optimizer.step" in event["name"] for event in events)
        base_us = json.loads(path.read_text())["baseTimeNanoseconds"] / 1000
        times = [base_us + float(event["ts"]) for event in events]
        spans.append((min(times), max(times)))
    (began_0, ended_0), (began_1, ended_1) = spans
    assert max(began_0, began_1) < min(ended_0, ended_1)  # at the same time

    again = gpulaunch("trace", "--steps", "2", "--rank", "1", "--again", timeout_s=180)  # the client is there by now
    assert again.code == 0, again
    stderr = end(gpulaunch, run)
    assert "ERROR" not in stderr, stderr  # Kineto says nothing on the ranks' stderr


@pytest.mark.torch
def test_a_program_that_has_used_the_profiler_itself_is_left_alone(gpulaunch) -> None:
    run = begin(gpulaunch, words=("profiled",))

    traced = gpulaunch("trace", "--duration", "100ms", timeout_s=180)
    assert traced.code == 1, traced
    assert traced.stdout.count("no trace: the program has used torch.profiler") == 2
    end(gpulaunch, run)


ALONE = """
import os, sys, time, torch
from gpulaunch.profiler.probe import kineto

kineto.start(torch, sys.argv[1])
assert not [name for name in os.environ if name.startswith("KINETO")]
inherited = os.popen("env").read()
assert "KINETO_USE_DAEMON" not in inherited and "KINETO_LOG_LEVEL" not in inherited, inherited
with torch.profiler.profile() as own:
    torch.ones(3) + 1
assert [event.name for event in own.events()].count("aten::add") == 1
try:
    kineto.start(torch, sys.argv[1])
except kineto.CannotTraceError as error:
    assert "has used torch.profiler" in str(error)
else:
    raise AssertionError("started twice")
child = os.fork()
if child == 0:
    sys.exit(3)
until_s = time.monotonic() + 60
while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
    if time.monotonic() > until_s:
        os.kill(child, 9)
        os.waitpid(child, 0)
        sys.exit("the child waits for ever")
    time.sleep(0.01)
assert os.waitstatus_to_exitcode(ended[1]) == 3
print("ended", flush=True)
"""


@pytest.mark.torch
def test_a_program_with_the_client_is_otherwise_as_it_was(directory: Path) -> None:
    """Its environment, a profiler of its own, a child of its own that ends as a Python program ends, its own end."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(directory)], capture_output=True, text=True, timeout=120, check=False
    )

    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
