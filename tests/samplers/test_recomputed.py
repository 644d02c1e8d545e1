"""What activation checkpoints compute again in backward, of stacks as torch 2.13 has them."""

from __future__ import annotations

import pytest

from gpulaunch.profiler.record.line_calls import RECOMPUTED
from gpulaunch.profiler.samplers.recomputed import recomputed
from gpulaunch.profiler.samplers.sampled_calls import Call
from gpulaunch.profiler.stack import Frame

PACKAGES = "/opt/conda/lib/python3.12/site-packages"
LAYER = Frame("Block.forward", "/home/me/model.py", 12)
MAIN = Frame("main", "/home/me/train.py", 90)
TRAINER = Frame("Trainer.train", f"{PACKAGES}/transformers/trainer.py", 1576)
UNPACK = Frame("unpack_hook", f"{PACKAGES}/torch/utils/checkpoint.py", 1120)
REENTRANT = Frame("CheckpointFunction.backward", f"{PACKAGES}/torch/utils/checkpoint.py", 300)
FORWARD = Frame("checkpoint", f"{PACKAGES}/torch/utils/checkpoint.py", 480)
ENGINE = Frame("_engine_run_backward", f"{PACKAGES}/torch/autograd/graph.py", 841)


@pytest.mark.parametrize(
    ("frames", "again"),
    [
        ([LAYER, UNPACK, ENGINE, MAIN], True),
        ([UNPACK, ENGINE, TRAINER, MAIN], True),
        ([LAYER, REENTRANT, ENGINE, MAIN], True),
        ([ENGINE, REENTRANT, ENGINE, MAIN], False),
        ([LAYER, UNPACK, ENGINE, REENTRANT, ENGINE, MAIN], True),
        ([ENGINE, MAIN], False),
        ([LAYER, FORWARD, MAIN], False),
        ([LAYER, UNPACK, ENGINE], False),
        ([], False),
    ],
    ids=[
        "",
        "in a trainer",
        "reentrant",
        "the part of backward that a reentrant one runs",
        "of a checkpoint in a checkpoint",
        "backward",
        "forward",
        "not called by the program",
        "no stack",
    ],
)
def test_a_forward_pass_in_backward_is_one_that_a_checkpoint_repeats(frames: list[Frame], again: bool) -> None:
    assert recomputed(frames) == (Call("/home/me/train.py", 90, RECOMPUTED) if again else None)
