"""Learns to tell fingerprints apart, two of a finger each (SimCLR), on two ranks that contrast the prints of both.

"The features of both ranks are gathered in each step, and their gradients go back. That is much talk for two ranks."
"""
# ranks: 2

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
FINGERS, BATCH, SIDE = 600, 48, 32


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        everyone = features.new_empty(dist.get_world_size() * len(features), features.shape[1])
        dist.all_gather_into_tensor(everyone, features.contiguous())
        return everyone

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def contrast(features, rank, heat=0.1):
    """Of its own rows only, against those of both ranks; a row's other print is BATCH rows away."""
    everyone = Gather.apply(features)
    count = len(features)
    likeness = features @ everyone.T / heat
    mine = torch.arange(count)
    likeness[mine, mine + rank * count] = float("-inf")
    return F.cross_entropy(likeness, (mine + count // 2) % count + rank * count)


class Prints:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        ridges = torch.randn(FINGERS, 1, SIDE, SIDE, generator=self.generator)
        self.ridges = F.avg_pool2d(ridges, 3, 1, 1) * 3

    def batch(self):
        ridges = self.ridges[torch.randperm(FINGERS, generator=self.generator)[:BATCH]].repeat(2, 1, 1, 1)
        pressed = 0.6 + 0.8 * torch.rand(2 * BATCH, 1, 1, 1, generator=self.generator)
        return ridges * pressed + 0.3 * torch.randn(ridges.shape, generator=self.generator)


class Encoder(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.project = nn.Sequential(nn.Linear(8 * width, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, prints):
        return F.normalize(self.project(self.body(prints)), dim=1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Encoder(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prints, stop = Prints(rank), torch.zeros(1)
    began, warm, step = time.perf_counter(), None, 0
    while not stop.item():
        loss = contrast(model(prints.batch()), rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if rank == 0 and step % 200 == 0:
            print(f"{step} loss {loss.item():.3f}", flush=True)
        if step % 25 == 0:
            stop.fill_(now - began > SECONDS)
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
