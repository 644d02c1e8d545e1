"""What goes between the CPU and an accelerator, done wrong in one way by each rank; the last one does all of it well.

The ranks are strangers to each other: they do not talk. Of every step of an accelerator's, 20 ms are the program's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from accelerator import DEVICE, Accelerator, Pinned
from pace import Training, arguments
from torch import nn

COMPUTE_S = 0.008
COPY_S = 0.008
ACCELERATOR = Accelerator(copy_s=COPY_S)

Moved = Callable[[torch.Tensor], torch.Tensor]


def well(batch: torch.Tensor) -> torch.Tensor:
    x = batch.as_subclass(Pinned).to(DEVICE, non_blocking=True)
    return x + torch.ones(4, 8, device=DEVICE)


def pageable(batch: torch.Tensor) -> torch.Tensor:
    x = batch.to(DEVICE, non_blocking=True)  # unpinned-copies
    return x + torch.ones(4, 8, device=DEVICE)


def blocking(batch: torch.Tensor) -> torch.Tensor:
    x = batch.as_subclass(Pinned).to(DEVICE)  # blocking-copies
    return x + torch.ones(4, 8, device=DEVICE)


def built(batch: torch.Tensor) -> torch.Tensor:
    x = batch.as_subclass(Pinned).to(DEVICE, non_blocking=True)
    ones = torch.ones(4, 8)  # tensor-built-on-cpu
    ones = ones.to(DEVICE)
    return x + ones


def parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)  # dataparallel


class OnAccelerator(Training):
    """The model is on the accelerator, and what it computes there takes its time there."""

    def __init__(self, move: Moved, model: nn.Module) -> None:
        super().__init__(model=model)
        self.move = move

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().step(self.move(x))
        ACCELERATOR.launch(COMPUTE_S)
        return loss


def read_always(step: int, loss: torch.Tensor) -> None:
    loss.item()  # sync-every-step


def read_now_and_then(step: int, loss: torch.Tensor) -> None:
    if step % 50 == 0:
        loss.item()


if __name__ == "__main__":
    args = arguments()
    rank = int(os.environ["RANK"])
    model: nn.Module = nn.Linear(8, 8).to(DEVICE)
    move = (pageable, blocking, well, built, well, well)[rank]
    read = read_always if rank == 2 else read_now_and_then
    training = OnAccelerator(move, parallel(model) if rank == 4 else model)
    with ACCELERATOR, torch.autocast("cpu", torch.bfloat16, enabled=rank == 5):
        training.run([torch.rand(4, 8) for _ in range(64)], seconds=args.seconds, after=read)
    with open(os.path.join(os.environ["GPULAUNCH_CHANNEL_DIR"], f"facts-{rank}.json")) as facts:
        print(f"rank {rank} facts {facts.read()}", flush=True)
