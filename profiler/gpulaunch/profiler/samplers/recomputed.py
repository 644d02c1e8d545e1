"""Finds what activation checkpoints compute again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpulaunch.profiler.record.line_calls import RECOMPUTED
from gpulaunch.profiler.samplers.sampled_calls import BACKWARD, Call, around_backward
from gpulaunch.profiler.stack import Frame

CHECKPOINT: Final = "/torch/utils/checkpoint.py"


def recomputed(frames: Sequence[Frame]) -> Call | None:
    """Return the line of the program that called backward, if a checkpoint computes a part of the forward pass again.

    A checkpoint with use_reentrant=True also runs its part of the backward pass, which is not computed again.

    Args:
        frames: the deepest first.
    """
    for frame in frames:
        if BACKWARD.search(frame.file):
            return None
        if frame.file.endswith(CHECKPOINT):
            break
    caller = next(iter(around_backward(frames)), None)
    return None if caller is None else Call(caller.file, caller.line, RECOMPUTED)
