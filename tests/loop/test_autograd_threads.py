"""Threads that begin with autograd at once, in fifty forked ranks, preloaded packages included.

Two things are replaced without a lock after a fork. The autograd engine, by the first backward: of 1,400 children in
which four threads began as in the program below 9 died (SIGSEGV, two cores, torch 2.13); a rank has it made before its
program begins. The thread pool of a process that has called torch.set_num_threads (pytorch/pytorch#178535): that no
fork server has such a pool is in test_preload.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

RANKS = 50
# Backward passes within backward passes: the 60th of them goes on in a thread of autograd's own.
PROGRAM = """
import threading

import numpy, sklearn.linear_model, torch, transformers

import sets_threads


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth:
            with torch.enable_grad():
                Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
        return gradient, None


def train():
    together.wait()
    Nested.apply(torch.ones(1, requires_grad=True), 62).sum().backward()


together = threading.Barrier(4)
threads = [threading.Thread(target=train) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert torch.autograd._is_checkpoint_valid()  # by what a rank has the engine made; asked before, it would hide the race
print("trained")
"""


def test_fifty_ranks_whose_autograd_starts_threads(gpulaunch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sets_threads.py").write_text("import torch; torch.set_num_threads(2)\n")
    ended = gpulaunch(
        *("--nproc", str(RANKS), "--no-profile", "--job-dir", tmp_path / "job", "train.py"),
        env={"PYTHONPATH": str(tmp_path / "site")},
        timeout_s=400,
    )
    assert ended.code == 0, ended
    assert ended.stdout.count("trained") == RANKS, ended
