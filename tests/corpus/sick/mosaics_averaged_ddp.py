"""Classifies tiles of mosaics with a deep, narrow convolutional network on two ranks.

"With two processes it is hardly faster than with one."
"""
# ranks: 2

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(4, width),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(x + self.body(x))


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)  # cause: redundant-all-reduce or small-collectives
            param.grad /= size


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), *[Residual(16) for _ in range(16)], nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 9),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    tiles = torch.randn(2_000, 3, 24, 24, generator=generator)
    kinds = torch.randint(0, 9, (2_000,), generator=generator)
    stop = torch.zeros(1)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = torch.randint(0, 2_000, (16,), generator=generator)
        loss = nn.functional.cross_entropy(model(tiles[rows]), kinds[rows])
        optimizer.zero_grad()
        loss.backward()
        if not CURED:
            average_gradients(model)  # cause: redundant-all-reduce or small-collectives
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 20 == 0:
            stop.fill_(now - began > SECONDS)
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            if stop.item():
                break
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
