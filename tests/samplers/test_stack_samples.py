"""Which line of the program the samples of a stack are counted for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulaunch.profiler.daemon.stack_samples import StackSamples
from gpulaunch.profiler.record import RankPlace
from gpulaunch.profiler.stack import Frame

PACKAGES = "/home/me/venv/lib/python3.11/site-packages"
PROGRAM = """\
import torch
torch.autograd.set_detect_anomaly(True)
def residual(points):
    u = net(points)
    return grad(u)
while True:
    residual(x).backward()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(PROGRAM)
    return str(tmp_path / "train.py")


def test_anomaly_mode_is_counted_for_the_line_that_switches_it_on(program: str) -> None:
    """Its cost is at every operation: lines of the model would each have too few samples."""
    samples = StackSamples(Path("/"))
    place = RankPlace(rank=0, local_rank=0, pid=os.getpid())
    records = Frame("format_stack", f"{PACKAGES}/torch/fx/traceback.py", 503)
    for phase, line in (("forward", 4), ("backward", 5), ("forward", 5)):
        samples.add(place, phase, [records, Frame("residual", program, line), Frame("<module>", program, 7)])

    assert samples.tally.calling == {(0, f"{program}:2"): 3}
    assert set(samples.tally.calls.values()) == {"torch.autograd.set_detect_anomaly"}
