"""A rank that is signalled: it lives to its step boundary when it is preempted, and makes place at once when not."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gpulaunch.profiler.channel.control import ControlWriter

pytestmark = pytest.mark.torch

UNTIL_KILLED = """
    import os, signal, sys, time, torch
    from gpulaunch.checkpoint import Checkpoint
    from torch.utils.data import DataLoader
    ckpt = Checkpoint(model=torch.nn.Linear(1, 1), dir=sys.argv[1])
    ckpt.resume()
    loader = DataLoader(range(1000), num_workers=1)
    for _ in ckpt.epochs(1):
        for _ in ckpt.batches(loader):
            ckpt.step()
            if ckpt.steps_done == 3:
                print("ready", flush=True)
                if sys.argv[2] == "in C":
                    # Where no Python handler runs: as a rank that waits for one that is gone.
                    import ctypes
                    mutex = ctypes.create_string_buffer(64)
                    ctypes.CDLL(None).pthread_mutex_lock(mutex)
                    ctypes.CDLL(None).pthread_mutex_lock(mutex)
            time.sleep(0.01)
"""


@pytest.mark.parametrize("where", ["in C", "in Python"])
@pytest.mark.parametrize("preempted", [True, False])
def test_a_rank_that_is_to_make_place_goes_at_once(
    where: str, preempted: bool, tmp_path: Path, control: ControlWriter
) -> None:
    """A SIGTERM is that where the agent says so; with another word of it the rank lives to its next boundary."""
    command = [sys.executable, "-c", textwrap.dedent(UNTIL_KILLED), str(tmp_path / "saved"), where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        if preempted:
            control.preempt(signal.SIGTERM, 1)
        else:
            control.leave(True)
        process.send_signal(signal.SIGTERM)
        if where == "in C" and preempted:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.0)
            process.kill()
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()

    expected = {("in C", True): -signal.SIGKILL, ("in Python", True): 75}
    assert process.returncode == expected.get((where, preempted), -signal.SIGTERM)


@pytest.mark.parametrize("says", ["to save", "to make place", "nothing"])
def test_the_agent_may_be_late_with_its_word(says: str, tmp_path: Path, control: ControlWriter) -> None:
    """Slurm signals ranks and agent at once, and on a full node the agent hears of it later."""
    command = [sys.executable, "-c", textwrap.dedent(UNTIL_KILLED), str(tmp_path / "saved"), "in Python"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            alive = process.poll() is None
            if says == "to save":
                control.preempt(signal.SIGTERM, 1)
            elif says == "to make place":
                control.leave(True)
            process.communicate(timeout=60)
        finally:
            process.kill()

    assert alive, "it went before anybody had told it to"
    assert process.returncode == (75 if says == "to save" else -signal.SIGTERM)
