"""A real job from its start to its flame graphs: the line that takes the time is there, in its phase."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from speedscope_format import faults_of

# Trains until a file tells it to end; most of a step is one sleep in the loss.
TRAIN = """
import os
import time

import torch
from torch.utils.data import DataLoader


def slow_loss(y):
    time.sleep(0.2)
    return y.square().sum()


model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while not os.path.exists("stop"):
    for x in DataLoader(torch.randn(8, 4), batch_size=4):
        slow_loss(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.torch
def test_the_flame_graph_of_a_job_shows_the_line_that_takes_the_time(gpulaunch: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    run = gpulaunch.start("--nproc", "1", "train.py")
    run.wait_for("/metrics")
    (url,) = re.findall(r"http://\S+/metrics", run.stderr)

    def sampled() -> bool:
        with urllib.request.urlopen(url, timeout=30) as page:
            found = re.findall(r'gpulaunch_stack_samples_total\{phase="forward"\} (\S+)', page.read().decode())
        return sum(map(float, found)) >= 2

    until_s = time.monotonic() + 120
    while not sampled():
        assert time.monotonic() < until_s, f"no sample\n{run.stderr}"
        time.sleep(0.2)
    (tmp_path / "stop").touch()
    ended = run.wait()
    drawn = gpulaunch("flame")

    assert (ended.code, drawn.code) == (0, 0), f"{ended}\n{drawn}"
    folded = (ended.run_dir / "stacks.folded").read_text()
    assert re.search(r"^forward;<module> \(\S*train.py:18\);slow_loss \(\S*train.py:10\) \d+$", folded, re.MULTILINE)
    assert "slow_loss (" in drawn.stdout
    assert "slow_loss (" in (ended.run_dir / "flame/forward.svg").read_text()
    assert faults_of(json.loads((ended.run_dir / "flame/stacks.speedscope.json").read_text())) == []


@pytest.mark.torch
def test_without_the_profiler_nobody_is_looked_into(gpulaunch: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(3)\n")
    ended = gpulaunch("--no-profile", "--nproc", "1", "train.py")
    drawn = gpulaunch("flame", ended.run_dir)

    assert (ended.code, drawn.code) == (0, 1)
    assert "no stacks in " in drawn.stdout
