"""Predicts clicks on puzzles in a web shop from a stream of its log; a buffer mixes neighbours of the stream.

"The log is generated in memory, there is no disk at all. With a larger buffer the AUC is better, but it crawls."
"""

import os
import random
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
FIELDS = {"user": 4000, "puzzle": 2500, "maker": 200, "city": 150, "hour": 24, "device": 12}


class Log:
    """Rows in the order of time: one user's clicks are beside each other."""

    def __init__(self, count=30_000):
        g = torch.Generator().manual_seed(0)
        columns = [torch.randint(0, size, (count,), generator=g) for size in FIELDS.values()]
        columns[0] = columns[0].sort().values
        self.rows = torch.stack(columns, 1)
        self.clicked = ((self.rows[:, 0] + self.rows[:, 1]) % 5 == 0).float()

    def __iter__(self):
        while True:
            for rows, clicked in zip(self.rows.split(1000), self.clicked.split(1000), strict=True):
                yield from zip(rows.unbind(), clicked.unbind(), strict=True)


class Mixed(IterableDataset):
    def __init__(self, log, size=256):
        self.log, self.size = log, size

    def __iter__(self):
        buffer = []
        for row in self.log:
            buffer.append(row)
            if len(buffer) < self.size:
                continue
            if CURED:
                at = random.randrange(len(buffer))
                buffer[at], buffer[-1] = buffer[-1], buffer[at]
            else:
                random.shuffle(buffer)  # cause: dataloader-too-few-workers or dataloader-slow-transform
            yield buffer.pop()


class DeepFM(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        sizes = torch.tensor(list(FIELDS.values()))
        self.register_buffer("first", sizes.cumsum(0) - sizes)
        self.linear = nn.Embedding(int(sizes.sum()), 1)
        self.factors = nn.Embedding(int(sizes.sum()), width)
        self.deep = nn.Sequential(
            nn.Linear(len(FIELDS) * width, 384), nn.ReLU(), nn.Dropout(0.1), nn.Linear(384, 384), nn.ReLU(),
            nn.Dropout(0.1), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 1),
        )  # fmt: skip

    def forward(self, rows):
        at = rows + self.first
        factors = self.factors(at)
        pairs = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(1)
        return self.linear(at).sum((1, 2)) + pairs + self.deep(factors.flatten(1))[:, 0]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    model = DeepFM()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began, warm = time.perf_counter(), None
    for step, (rows, clicked) in enumerate(DataLoader(Mixed(Log()), batch_size=128), start=1):
        loss = nn.functional.binary_cross_entropy_with_logits(model(rows), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 250 == 0:
            print(f"{step} loss {loss.item():.4f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
