"""Several ranks, DDP and FSDP2: saved together or not at all, and gone on from with as many ranks or others."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from gpulaunch.launcher.checkpoint.manifest import read, verify

pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).parent / "ranks_program.py"


def said(ended, word: str) -> set[tuple[str, str]]:
    """(step, digest) that the ranks have printed after `word`; all alike: one."""
    return {(step, digest) for step, digest in re.findall(rf"{word} (\w+) (\w+)$", ended.stdout, re.MULTILINE)}


def run(gpulaunch, ranks: int, *arguments: object):
    ended = gpulaunch("--nproc", str(ranks), PROGRAM, *map(str, arguments))
    assert ended.code == 0, ended
    return ended


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_on_the_same_ranks_and_on_others(gpulaunch, tmp_path: Path, kind: str) -> None:
    """On as many ranks the rest of the run is the same to the bit; on others the state is."""
    undisturbed = run(gpulaunch, 2, kind, tmp_path / "undisturbed", 8)
    first = run(gpulaunch, 2, kind, tmp_path / "saved", 4)
    again = run(gpulaunch, 2, kind, tmp_path / "saved", 8)
    alone = run(gpulaunch, 1, kind, tmp_path / "saved", 10)
    wider = run(gpulaunch, 2, kind, tmp_path / "saved", 12)

    assert said(again, "BEGIN") == said(first, "END")
    assert said(again, "END") == said(undisturbed, "END")
    assert said(alone, "BEGIN") == said(again, "END")
    assert "resuming on 1 ranks a checkpoint of 2" in alone.stderr
    assert said(wider, "BEGIN") == said(alone, "END")
    (end,) = said(wider, "END")
    assert end[0] == "12"
    assert read(str(tmp_path / "saved" / "step-000000000010")).world_size == 1
    verify(str(tmp_path / "saved" / "step-000000000012"))


def test_one_rank_that_is_told_to_end_ends_all_at_one_step(gpulaunch, tmp_path: Path) -> None:
    ended = gpulaunch("--nproc", "2", PROGRAM, "ddp", tmp_path / "saved", "100000", "sigterm")

    (checkpoint,) = (name for name in os.listdir(tmp_path / "saved") if name.startswith("step-"))
    assert ended.code == 75, ended
    assert f"preempted: saved at step {int(checkpoint[5:])}" in ended.stderr
    verify(str(tmp_path / "saved" / checkpoint))


def test_what_one_rank_cannot_write_nobody_commits(gpulaunch, tmp_path: Path) -> None:
    ended = run(gpulaunch, 2, "ddp", tmp_path / "saved", 6, "full")

    assert ended.stderr.count("could not be saved") == 1
    assert re.search(r"step 2 could not be saved in .*: rank 1: File too large; training continues", ended.stderr)
    assert sorted(name for name in os.listdir(tmp_path / "saved") if name[0] == "s") == [
        f"step-{step:012d}" for step in (1, 4, 5, 6)
    ]
    assert not [name for name in os.listdir(tmp_path / "saved") if name.startswith(".saving")]
