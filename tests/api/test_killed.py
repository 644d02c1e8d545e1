"""A run whose ranks are killed again and again ends bit for bit where the run ends that nobody touched."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).parent / "killed_program.py"
KILLS = 20
STEPS = 400  # epochs x (samples / batch / ranks)


class Killer(threading.Thread):
    """Kills a random rank after a random number of steps, `KILLS` times.

    From the sixth on not before something has been saved: on a busy machine that takes longer than the steps.
    """

    def __init__(self, logs: Path, saved: Path) -> None:
        super().__init__(daemon=True)
        self._logs = logs
        self._saved = saved
        self._random = random.Random()
        self.seed = self._random.randrange(1 << 32)
        self._random.seed(self.seed)
        self.kills = 0
        self.stop = threading.Event()

    def run(self) -> None:
        life = 0
        while self.kills < KILLS:
            rank, steps = self._random.randrange(2), self._random.randrange(1, 22)
            while not self.stop.wait(0.002):
                lines = lines_of(self._logs, rank)
                pids = [index for index, line in enumerate(lines) if line.startswith("pid")]
                may_kill = self.kills < KILLS // 4 or any(self._saved.glob("step-*"))
                if may_kill and len(pids) > life and len(lines) - pids[-1] > steps:
                    os.kill(int(lines[pids[-1]].split()[1]), signal.SIGKILL)
                    self.kills += 1
                    life = len(pids)
                    break
            else:
                return


def lines_of(logs: Path, rank: int) -> list[str]:
    """The complete lines that a rank has written, over all its lives."""
    path = logs / f"rank-{rank}"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def history(logs: Path, rank: int) -> dict[int, set[str]]:
    """Step -> everything that was written of it; more than one text: a step that was redone differed."""
    steps: dict[int, set[str]] = {}
    for line in lines_of(logs, rank):
        if line.partition(" ")[0].isdigit():
            steps.setdefault(int(line.split()[0]), set()).add(line)
    return steps


def directories(path: Path) -> tuple[str, str]:
    for name in ("saved", "logs"):
        (path / name).mkdir(parents=True)
    return str(path / "saved"), str(path / "logs")


def test_twenty_kills_change_nothing(gpulaunch, tmp_path: Path) -> None:
    """Losses (all bits) and sample indices of every step of both ranks, also of the steps that were done twice."""
    saved, logs = directories(tmp_path / "undisturbed")
    undisturbed = gpulaunch("--nproc", "2", PROGRAM, saved, logs)
    assert undisturbed.code == 0, undisturbed
    expected = [history(Path(logs), rank) for rank in range(2)]

    saved, logs = directories(tmp_path / "killed")
    killer = Killer(Path(logs), Path(saved))
    run = gpulaunch.start(
        "--nproc", "2", "--max-restarts", "40", "--job-dir", str(tmp_path / "job"), PROGRAM, saved, logs
    )
    killer.start()
    try:
        ended = run.wait(timeout_s=240)
    finally:
        killer.stop.set()
        killer.join()

    assert ended.code == 0, f"seed {killer.seed}: {ended}"
    assert killer.kills == KILLS, f"seed {killer.seed}: the run ended before"
    assert [len(steps) for steps in expected] == [STEPS, STEPS]
    for rank in range(2):
        assert history(Path(logs), rank) == expected[rank], f"seed {killer.seed}: rank {rank}"
    assert ended.stderr.count("resumed from step") > KILLS // 2
