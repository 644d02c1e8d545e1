"""Traces of real jobs: torch's own client, in ranks that were forked after torch was loaded and in spawned ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from trace_format import faults_of

from gpulaunch.launcher.cli import trace, tracer
from gpulaunch.profiler.daemon.tracefile import part_name

TRAIN = Path(__file__).with_name("train_traced.py")
STEP_S = 0.5
"""At least, of the slow program. Where others have the cores, a rank was seen to begin 0.1 s late."""


def begin(gpulaunch, *args: str, words: tuple[str, ...] = ()):
    """A job of two ranks that trains."""
    run = gpulaunch.start("--nproc", "2", *args, TRAIN, *words)
    run.wait_until(lambda run: run.stdout.count("training") == 2)
    return run


def end(gpulaunch, run):
    """Let the job end by itself."""
    (gpulaunch.cwd / "stop").touch()
    ended = run.wait()
    assert ended.code == 0, ended
    assert ended.stdout.count("trained ") == 2
    return ended


def events_of(path: Path) -> list[dict]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


def rank_of(path: Path) -> dict:
    """What is written beside a trace about it."""
    (rank,) = [
        each for each in json.loads(path.with_name("trace.json").read_text())["ranks"] if each["path"] == str(path)
    ]
    return rank


def span_us(path: Path) -> tuple[float, float]:
    """From the first event of a trace to the last, by the clock on the wall."""
    base_us = json.loads(path.read_text())["baseTimeNanoseconds"] / 1000
    times = [base_us + event["ts"] for event in events_of(path)]
    return min(times), max(times)


def steps_in(path: Path) -> list[int]:
    """The steps that a trace has from their beginning on, by the program's own count."""
    named = (re.fullmatch(r"step (\d+)", event["name"]) for event in events_of(path))
    return sorted(int(name[1]) for name in named if name)


def overlap(paths: list[Path]) -> bool:
    (began_0, ended_0), (began_1, ended_1) = map(span_us, paths)
    return max(began_0, began_1) < min(ended_0, ended_1)


def begin_together(paths: list[Path]) -> bool:
    """Whether the first step of both is the same.

    Or the next one: ranks that train together are in the same step, but one of them may just have begun it when the
    other was about to, and the start that all are told is a moment, not a step.
    """
    first_0, first_1 = (steps_in(path)[0] for path in paths)
    return abs(first_0 - first_1) <= 1


@pytest.mark.torch
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_two_ranks_are_traced_together_and_train_on(
    gpulaunch, start_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(gpulaunch, "--start-method", start_method, words=("fork", "slow"))

    traced = gpulaunch("trace", "--steps", "5", timeout_s=180)
    assert traced.code == 0, traced

    paths = sorted(traced.run_dir.glob("traces/*/rank-*.json"))
    assert [path.name for path in paths] == ["rank-0.json", "rank-1.json"]
    for path in paths:
        events, told = events_of(path), rank_of(path)
        whole = told["num_steps"]
        assert whole > 1
        assert sum(event["name"] == "aten::addmm" for event in events) >= 2 * (whole - 1)  # two layers in each step
        assert any("Optimizer.step" in event["name"] for event in events)
        first = told["first_step"]  # as it was to be; a rank that begins late has lost it
        assert {*range(first + 1, first + whole - 1)} <= {*steps_in(path)}
        assert faults_of(json.loads(path.read_text())) == []
    assert overlap(paths)
    assert begin_together(paths)

    # The client is there by now. And what is asserted above would not be so if a rank began a part of the window late.
    late(monkeypatch, rank=1, by_s=4 * STEP_S)
    monkeypatch.setattr(tracer, "MISSED_AFTER_NS", 60 * 10**9)  # it is waited for
    assert trace.run(["--steps", "5", "--job-dir", str(traced.run_dir), "--again"]) == 0
    again = sorted({*traced.run_dir.glob("traces/*/rank-*.json")} - {*paths})
    assert len(again) == 2
    assert overlap(again)
    assert not begin_together(again)

    ended = end(gpulaunch, run)
    assert "ERROR" not in ended.stderr, ended.stderr  # Kineto says nothing on the ranks' stderr
    told = [rank_of(path) for path in paths]
    assert_told_of_steps(told, traced.stdout, ended.stdout)
    assert_told_of_memory(told, traced.stdout, ended.stdout)


def late(monkeypatch: pytest.MonkeyPatch, *, rank: int, by_s: float) -> None:
    """Have this rank told another start than the others."""
    order = tracer.order

    def later(path, *, start_ms, **more):
        by_ms = round(by_s * 1e3) if Path(path).name == part_name(rank) else 0
        return order(path, start_ms=start_ms + by_ms, **more)

    monkeypatch.setattr(tracer, "order", later)


def assert_told_of_steps(told: list[dict], stdout: str, program: str) -> None:
    """How long they took before, during and after: as the program's own clock has it, and nothing is faster."""
    shown = re.findall(r"^  step (.+) before, (.+) during, (.+) after$", stdout, re.MULTILINE)
    own = re.findall(r"steps of ([\d.]+) s", program)
    assert len(shown) == len(own) == len(told) == 2
    for rank, times in zip(told, shown, strict=True):
        steps_s = [rank[when]["step_s"] for when in ("before", "during", "after")]
        in_s = [float(number) * {"ms": 0.001, "s": 1.0}[unit] for number, unit in map(str.split, times)]
        assert in_s == pytest.approx(steps_s, rel=0.01)
        assert min(steps_s) >= STEP_S
        assert steps_s[0] == pytest.approx(float(own[0]), rel=0.3)
        is_slower = f"warning: rank {rank['rank']} is still slower than before" in stdout
        assert is_slower == (rank["back"] is False)


def assert_told_of_memory(told: list[dict], stdout: str, program: str) -> None:
    """The resident memory before, at most and after: as the program itself has read it when it began."""
    shown = re.findall(r"^  memory ([\d.]+) MB before, ([\d.]+) MB at most, ([\d.]+) MB after$", stdout, re.MULTILINE)
    own = [int(size) for size in re.findall(r"training with (\d+) bytes", program)]
    assert len(shown) == len(own) == len(told) == 2
    for rank, sizes_mb in zip(told, shown, strict=True):
        before, most, after = (rank["rss"][f"{when}_bytes"] for when in ("before", "during", "after"))
        assert [1e6 * float(size_mb) for size_mb in sizes_mb] == pytest.approx([before, most, after], rel=0.01)
        assert max(before, after) <= most
        assert 0.7 * min(own) < before < 1.3 * max(own)


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
