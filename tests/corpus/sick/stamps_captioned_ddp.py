"""Learns stamps and their catalogue entries in one space, as CLIP does, on two ranks; all pairs of both are contrasted.

"With twice the ranks we have twice the pairs to tell apart, but a step takes far longer than with one rank."
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
CURED = os.environ.get("CURED") == "1"
BATCH, WORDS, LENGTH, WIDTH = 512, 2000, 12, 64


class Gathered(torch.autograd.Function):
    """The rows of all ranks; a rank's gradient is the sum of what all of them have for its rows."""

    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(1, 12, 4, stride=2), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2), nn.ReLU(), nn.Flatten(),
            nn.Linear(216, WIDTH),
        )  # fmt: skip
        self.read = nn.Sequential(nn.EmbeddingBag(WORDS, 64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, WIDTH))
        self.scale = nn.Parameter(torch.tensor(2.3))

    def forward(self, stamps, entries):
        stamps, entries = F.normalize(self.look(stamps), dim=1), F.normalize(self.read(entries), dim=1)
        return stamps, entries, self.scale.exp()


class PairLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = dist.get_rank() * BATCH

    def forward(self, stamps, entries, scale):
        all_stamps, all_entries = Gathered.apply(stamps), Gathered.apply(entries)
        if CURED:
            by_stamp, by_entry = scale * stamps @ all_entries.T, scale * entries @ all_stamps.T
            right = torch.arange(self.first, self.first + BATCH)
        else:
            by_stamp = scale * all_stamps @ all_entries.T  # cause: hot-line
            by_entry = by_stamp.T
            right = torch.arange(len(by_stamp))
        return (F.cross_entropy(by_stamp, right) + F.cross_entropy(by_entry, right)) / 2


class Trainer:
    def __init__(self):
        self.rank = dist.get_rank()
        g = torch.Generator().manual_seed(self.rank)
        self.entries = torch.randint(0, WORDS, (4000, LENGTH), generator=g)
        self.stamps = torch.randn(4000, 1, 18, 18, generator=g)
        self.stamps[:, 0, :LENGTH, 0] += self.entries / WORDS * 3
        self.model = DistributedDataParallel(Towers())
        self.loss = PairLoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4)

    def train_step(self):
        rows = torch.randint(len(self.stamps), (BATCH,))
        loss = self.loss(*self.model(self.stamps[rows], self.entries[rows]))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def fit(self):
        began, warm, step, stop = time.perf_counter(), None, 0, torch.zeros(1)
        while not stop.item():
            loss = self.train_step()
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if self.rank == 0 and step % 200 == 0:
                print(f"{step} {loss.item():.3f}", flush=True)
            if step % 20 == 0:
                stop.fill_(now - began > SECONDS)
                dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if self.rank == 0:
            print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer().fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
