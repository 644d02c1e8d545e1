"""Checkpoints for a training program: save while training and resume after any interruption, in five lines of code.

    ckpt = Checkpoint(model=model, optimizer=optimizer, every=100)
    ckpt.resume()
    for epoch in ckpt.epochs(10):
        for batch in ckpt.batches(loader):
            ...                 # forward, backward, optimizer.step()
            ckpt.step()

Under gpulaunch, under torchrun and under plain python. See docs/checkpoints.md.
"""

from __future__ import annotations

from gpulaunch.checkpoint.api import Checkpoint
from gpulaunch.checkpoint.messages import CheckpointError, DirectoryInUse, Preempted

__all__ = ["Checkpoint", "CheckpointError", "DirectoryInUse", "Preempted"]
