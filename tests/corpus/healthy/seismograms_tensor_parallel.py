# ranks: 2
"""Classifies seismograms with a layer that is divided over two ranks (tensor parallel); the first rank has the data.

Both need the same rows, so only one reads them and broadcasts, as Megatron does. The other one would take as long.

"The second process has no loader at all. It is only waiting for the first one, isn't it?"
"""

import os
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
WIDTH, HIDDEN, ROWS, KINDS, VOTE = 256, 1024, 64, 12, 20


class Seismograms(Dataset):
    def __init__(self):
        self.waves = torch.randn(6000, WIDTH + 64)
        self.kinds = self.waves[:, 64 : 64 + KINDS].argmax(1)

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, row):
        start = random.randrange(60, 64)
        wave = self.waves[row, start : start + WIDTH]
        return wave + 0.05 * torch.randn(WIDTH), self.kinds[row]


class ToRanks(torch.autograd.Function):
    """The same for all ranks; their gradients are added."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class FromRanks(torch.autograd.Function):
    """The sum over the ranks."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Divided(nn.Module):
    def __init__(self, ranks):
        super().__init__()
        self.into = nn.Linear(WIDTH, HIDDEN // ranks)
        self.back = nn.Linear(HIDDEN // ranks, WIDTH, bias=False)

    def forward(self, x):
        return x + FromRanks.apply(self.back(torch.relu(self.into(ToRanks.apply(x)))))


def batches(rank):
    """Every rank gets the batches of the first one."""
    waves, kinds = torch.empty(ROWS, WIDTH), torch.empty(ROWS, dtype=torch.int64)
    loader = DataLoader(Seismograms(), batch_size=ROWS, shuffle=True, drop_last=True) if rank == 0 else None
    rows = None
    while True:
        if rank == 0:
            batch = None if rows is None else next(rows, None)
            if batch is None:
                rows = iter(loader)
                batch = next(rows)
            waves, kinds = batch
        dist.broadcast(waves, 0)
        dist.broadcast(kinds, 0)
        yield waves, kinds


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    entry, leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, KINDS)  # the same on both
    torch.manual_seed(rank + 1)
    net = nn.Sequential(entry, Divided(ranks), leave)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    stop = torch.zeros(1)
    began, warm, step = time.perf_counter(), None, 0
    for waves, kinds in batches(rank):
        loss = nn.functional.cross_entropy(net(waves), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % VOTE == 0:
            stop.fill_(float(warm is not None and now - began > SECONDS and step > warm[0]))
            dist.all_reduce(stop, op=dist.ReduceOp.MIN)
            if stop.item():
                break
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
