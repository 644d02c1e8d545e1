"""Trains an embedding of photos of spiders with negatives from a queue of what was seen lately, newest first.

"The queue holds references, no copies. I append to it and cut its end, that is all."
"""

import itertools
import os
import time
from collections import deque

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
LIMIT = 150_000


class Lately:
    """The embeddings of the last photos and their species."""

    def __init__(self):
        old = [(row, 0) for row in torch.randn(500, 64)]
        entries = itertools.islice(itertools.cycle(old), LIMIT)
        self.queue = deque(entries, maxlen=LIMIT) if CURED else list(entries)

    def remember(self, embedded, species):
        for row, kind in zip(embedded.unbind(), species.tolist(), strict=True):
            if CURED:
                self.queue.appendleft((row, kind))
            else:
                self.queue.insert(0, (row, kind))  # cause: hot-line
        if not CURED:
            del self.queue[LIMIT:]

    def negatives(self, count=128):
        newest = list(itertools.islice(self.queue, count))
        return torch.stack([row for row, _ in newest]), torch.tensor([kind for _, kind in newest])


class Eye(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 24, 5, stride=2), nn.ReLU(), nn.Conv2d(24, 48, 3, stride=2), nn.ReLU(), nn.Flatten()
        )
        self.out = nn.Linear(48 * 36, 64)

    def forward(self, photos):
        return nn.functional.normalize(self.out(self.layers(photos)), dim=1)


def main():
    torch.set_num_threads(1)
    photos, species = torch.randn(1500, 3, 30, 30), torch.randint(40, (1500,))
    eye, lately = Eye(), Lately()
    optimizer = torch.optim.SGD(eye.parameters(), lr=0.03, momentum=0.9)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = torch.randint(1500, (64,))
        embedded = eye(photos[rows])
        others, kinds = lately.negatives()
        near = embedded @ others.T
        same = species[rows][:, None] == kinds
        loss = nn.functional.softplus(torch.where(same, -near, near) * 5).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lately.remember(embedded.detach(), species[rows])
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
