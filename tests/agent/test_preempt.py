"""A job that is told to end saves first, and says by its exit code whether it can go on another time."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import time
from pathlib import Path

import pytest

from gpulaunch.launcher.loop import linux

pytestmark = pytest.mark.torch

# Saves when it is told to, by a handler of its own, as many scripts do.
HANDLER = """
    import os, signal, sys, time, torch
    told = []
    signal.signal(getattr(signal, "{name}"), lambda *_: told.append(1))
    print("READY", flush=True)
    for step in range(3000):
        time.sleep(0.02)
        if told:
            told.clear()  # before anybody can know that it has saved: the next notice may come at once
            torch.save({"step": step}, os.path.join(os.environ["GPULAUNCH_CHECKPOINT_DIR"], f"ckpt_{step}.pt"))
            print("SAVED", flush=True)
            if {ends}:
                sys.exit(0)
"""
DEAF = """
    import time
    print("READY", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job" / "checkpoints").mkdir(parents=True)
    return tmp_path / "job"


def script(path: Path, text: str, **values: object) -> Path:
    file = path / "train.py"
    text = textwrap.dedent(text)
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    file.write_text(text)
    return file


def ready(ranks: int):
    return lambda run: run.stdout.count("READY") == ranks


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_script_that_saves_in_its_handler_ends_with_75(gpulaunch, tmp_path: Path, job: Path, name: str) -> None:
    run = gpulaunch.start("--nproc", "2", "--job-dir", job, script(tmp_path, HANDLER, name=name, ends=True))
    run.wait_until(ready(2))

    run.signal(getattr(signal, name))
    ended = run.wait()

    assert ended.code == 75, ended
    assert ended.stdout.count("SAVED") == 2


def test_without_a_checkpoint_the_signal_is_the_code(gpulaunch, tmp_path: Path) -> None:
    run = gpulaunch.start("--nproc", "2", script(tmp_path, DEAF))
    run.wait_until(ready(2))

    run.signal(signal.SIGTERM)

    assert run.wait().code == 143


def test_ranks_that_know_nothing_of_sigusr1_are_asked_to_end_as_torchrun_would(gpulaunch, tmp_path: Path) -> None:
    run = gpulaunch.start("--nproc", "2", "--shutdown-timeout", "600", script(tmp_path, DEAF))
    run.wait_until(ready(2))

    run.signal(signal.SIGUSR1)
    ended = run.wait()  # bounded: neither as long as they would sleep, nor as they are given

    assert ended.code == 128 + signal.SIGUSR1


def test_a_notice_is_passed_on_and_the_job_goes_on(gpulaunch, tmp_path: Path, job: Path) -> None:
    run = gpulaunch.start("--nproc", "2", "--job-dir", job, script(tmp_path, HANDLER, name="SIGUSR2", ends=False))
    run.wait_until(ready(2))

    run.signal(signal.SIGUSR2)
    run.wait_until(lambda run: run.stdout.count("SAVED") == 2)
    run.signal(signal.SIGUSR2)
    run.wait_until(lambda run: run.stdout.count("SAVED") == 4)
    run.signal(signal.SIGINT)

    assert run.wait().code == 130


def test_a_notice_to_ranks_that_do_not_catch_it_kills_nobody(gpulaunch, tmp_path: Path) -> None:
    """A job manager that signals every process of the step reaches ranks and helpers directly, too."""
    run = gpulaunch.start("--nproc", "2", script(tmp_path, DEAF))
    run.wait_until(ready(2))
    family = linux.descendants_of(run.pid)
    assert len(family) >= 4, "ranks, fork server, sidecar, keeper"

    for pid in family:
        os.kill(pid, signal.SIGUSR2)
    run.signal(signal.SIGUSR2)
    run.wait_for("asked the ranks to save at their next step and continue")

    assert [pid for pid in family if linux.state_of(pid) in ("", "Z")] == []
    run.signal(signal.SIGINT)
    assert run.wait().code == 130


# Needs a second to save, as a checkpoint of some size does.
SLOW = HANDLER.replace("    if told:\n", "    if told:\n            time.sleep(1)\n")


@pytest.mark.parametrize("again", ["SIGTERM", "SIGUSR1"])
def test_a_notice_that_is_given_twice_is_one_notice(gpulaunch, tmp_path: Path, job: Path, again: str) -> None:
    """Slurm says SIGTERM twice within a second at the time limit: no reason to kill ranks that are saving."""
    run = gpulaunch.start("--nproc", "2", "--job-dir", job, script(tmp_path, SLOW, name="SIGTERM", ends=True))
    run.wait_until(ready(2))

    run.signal(signal.SIGTERM)
    run.wait_for("asked the ranks to end")
    run.signal(getattr(signal, again))
    ended = run.wait()

    assert (ended.code, ended.stdout.count("SAVED")) == (75, 2), ended


def test_ctrl_c_twice_means_now(gpulaunch, tmp_path: Path, job: Path) -> None:
    slower = SLOW.replace("time.sleep(1)", "time.sleep(10)")
    run = gpulaunch.start("--nproc", "2", "--job-dir", job, script(tmp_path, slower, name="SIGINT", ends=True))
    run.wait_until(ready(2))

    run.signal(signal.SIGINT)
    run.wait_for("asked the ranks to end")
    run.signal(signal.SIGINT)
    ended = run.wait()

    assert (ended.code, ended.stdout.count("SAVED")) == (130, 0), ended


def test_a_notice_before_anybody_can_hear_it_is_held(gpulaunch, tmp_path: Path) -> None:
    """It came while Python was still starting: the process was killed by it, before."""
    run = gpulaunch.start("--nproc", "2", script(tmp_path, DEAF))
    wait_for_main(run.pid)
    run.signal(signal.SIGUSR1)

    ended = run.wait()

    assert ended.code == 128 + signal.SIGUSR1, ended
    assert "SIGUSR1: asked the ranks to end" in ended.stderr


def wait_for_main(pid: int) -> None:
    """Until `main` has run its first line: SIGUSR1 is blocked."""
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        status = Path(f"/proc/{pid}/status").read_text()
        blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
        if blocked >> (signal.SIGUSR1 - 1) & 1:
            return
    pytest.fail("SIGUSR1 is never held")


def test_a_preempted_job_is_not_restarted(gpulaunch, tmp_path: Path, job: Path) -> None:
    run = gpulaunch.start(
        *("--nproc", "2", "--max-restarts", "5", "--job-dir", job),
        script(tmp_path, HANDLER, name="SIGUSR1", ends=True),
    )
    run.wait_until(ready(2))

    run.signal(signal.SIGUSR1)
    ended = run.wait()

    assert (ended.code, ended.stdout.count("READY")) == (75, 2)
    assert "failed" not in ended.stderr
    last = json.loads((job / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["preempted"]) == ("run_ended", 1)


# Rank 0 fails once rank 1 does not hear SIGTERM any more, which is still at it at the end of the grace.
FAILING = """
    import os, signal, sys, time, torch
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ["RANK"] == "0":
        torch.save({"step": 1}, os.path.join(os.environ["GPULAUNCH_CHECKPOINT_DIR"], f"ckpt_1.pt"))
        while not os.path.exists("deaf"):
            time.sleep(0.01)
        os._exit(9)
    open("deaf", "w").close()
    time.sleep(60)
"""


def test_preempted_in_the_moment_of_a_failure_the_job_is_to_be_run_again(gpulaunch, tmp_path: Path, job: Path) -> None:
    run = gpulaunch.start(
        *("--nproc", "2", "--max-restarts", "3", "--failure-grace", "8", "--job-dir", job), script(tmp_path, FAILING)
    )
    events = job / "events.jsonl"
    wait_until(lambda: events.exists() and '"stopping"' in events.read_text())

    run.signal(signal.SIGTERM)

    assert run.wait().code == 75


def wait_until(condition, *, pause_s: float = 0.02, within_s: float = 120.0) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s, "never came"
        time.sleep(pause_s)
