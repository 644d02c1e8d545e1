"""Predicts the next chord of hymns on two ranks with a deep and narrow residual network.

"The flag is from our template: some models of the group need it, and it does no harm to the others, they say."
"""
# ranks: 2

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Hymns(nn.Module):
    def __init__(self, width=32, depth=10, chords=96):
        super().__init__()
        self.chords = nn.Embedding(chords, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, chords)

    def forward(self, verses):
        return self.head(self.blocks(self.chords(verses).mean(1)))


def wrap(model):
    return DistributedDataParallel(model, find_unused_parameters=not CURED)  # cause: unused-parameters-searched


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    verses = torch.randint(0, 96, (8_192, 16))
    data = TensorDataset(verses, verses.sum(1) % 96)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    model = wrap(Hymns())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
    began, warm, step, epoch, done = time.perf_counter(), None, 0, 0, False
    while not done:
        sampler.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
        stop = torch.tensor([float(now - began > SECONDS)])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        done = bool(stop)
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
