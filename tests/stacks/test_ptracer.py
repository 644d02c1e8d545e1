"""Who may look into a rank: what ranks and their workers really ask of the kernel, in a real run.

Under Yama only ancestors may read the stacks of a process, and neither the sidecar nor py-spy is one. Whether a kernel
has Yama cannot be chosen here; so what is looked at is the call: libc's prctl has a stand-in in every process of the
run, which writes down what it is given, and then calls it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

PR_SET_PTRACER = 0x59616D61

STAND_IN = """
import ctypes
import json
import os

SAID = os.path.join(os.path.dirname(__file__), "said")


class Libc(ctypes.CDLL):
    def __getattr__(self, name):
        function = super().__getattr__(name)
        if name == "prctl":
            self.prctl = function = standing_in_for(function)
        return function


def standing_in_for(prctl):
    def tell(*arguments):
        told = [(type(each).__name__, getattr(each, "value", each)) for each in arguments]
        said = os.open(SAID, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(said, (json.dumps([os.getpid(), told], default=repr) + "\\n").encode())
        os.close(said)
        return prctl(*arguments)

    return tell


ctypes.CDLL = Libc
"""

TRAIN = """
import os

import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        open(f"worker-{os.getpid()}", "w").close()
        return torch.zeros(2)


open(f"rank-{os.getpid()}", "w").close()
for _ in DataLoader(Samples(), batch_size=1, num_workers=2):
    pass
"""


def pids_of(directory: Path, who: str) -> set[int]:
    return {int(path.name.removeprefix(f"{who}-")) for path in directory.glob(f"{who}-*")}


def calls_of(gpulaunch: Any, directory: Path, *options: str) -> tuple[list[Any], set[int], int]:
    """A run's calls of prctl, the pids of its ranks and workers, and the launcher's."""
    apart = directory / "python"
    apart.mkdir()
    (apart / "sitecustomize.py").write_text(STAND_IN)
    (directory / "train.py").write_text(TRAIN)

    ended = gpulaunch("--nproc", "2", *options, "train.py", env={"PYTHONPATH": str(apart)})
    assert ended.code == 0, ended

    ranks, workers = pids_of(directory, "rank"), pids_of(directory, "worker")
    assert (len(ranks), len(workers)) == (2, 4)
    (group,) = directory.glob("gpulaunch-runs/*/group.json")
    calls = [json.loads(line) for line in (apart / "said").read_text().splitlines()]
    return calls, ranks | workers, json.loads(group.read_text())["agent_pid"]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_ranks_and_their_workers_let_the_launcher_look_into_them_and_nobody_else(
    gpulaunch: Any, tmp_path: Path, start_method: str
) -> None:
    """Once each: the launcher and what that starts, as a number as wide as the kernel reads it."""
    calls, pids, launcher_pid = calls_of(gpulaunch, tmp_path, "--start-method", start_method)

    asked = [(pid, told) for pid, ((_, option), *told) in calls if option == PR_SET_PTRACER]
    assert sorted(pid for pid, _ in asked) == sorted(pids)
    for _, (who, *rest) in asked:
        assert who == ["c_ulong", launcher_pid]
        assert [value for _, value in rest] == [0, 0, 0]
    assert len(calls) > len(asked), "the stand-in has seen what else is asked of the kernel"


def test_without_a_profile_nobody_is_let_look(gpulaunch: Any, tmp_path: Path) -> None:
    calls, _, _ = calls_of(gpulaunch, tmp_path, "--no-profile")

    assert [told for _, ((_, option), *told) in calls if option == PR_SET_PTRACER] == []
    assert calls, "the stand-in has seen what else is asked of the kernel"
