"""Trains a ranking of hotels by what guests have clicked; its loss compares the offers of each search.

"The loss is just a few subtractions, the network has all the weights."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def pairwise(scores, clicks, sizes):
    """A search has between 6 and 14 offers; those that were clicked should stand above the others."""
    if CURED:
        real = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
        rows, liked = (torch.full(real.shape, -1.0).masked_scatter(real, each) for each in (scores, clicks))
        pairs = (liked[:, :, None] == 1) & (liked[:, None, :] == 0)
        lost = nn.functional.softplus(rows[:, None, :] - rows[:, :, None]) * pairs
        return (lost.sum((1, 2)) / pairs.sum((1, 2)).clamp(min=1)).mean()
    total = 0.0
    start = 0
    for size in sizes:  # cause: small-operations-loop
        score, click = scores[start : start + size], clicks[start : start + size]
        pairs = (click[:, None] == 1) & (click[None] == 0)
        lost = nn.functional.softplus(score[None] - score[:, None]) * pairs
        total = total + lost.sum() / pairs.sum().clamp(min=1)
        start += size
    return total / len(sizes)


class Ranker(nn.Module):
    def __init__(self, hotels=2000):
        super().__init__()
        self.hotel = nn.EmbeddingBag(hotels, 48, mode="sum")
        self.score = nn.Sequential(
            nn.Linear(48 + 20, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, 1)
        )

    def forward(self, hotels, features):
        return self.score(torch.cat([self.hotel(hotels), features], 1)).squeeze(1)


def searches(count=128):
    """Endlessly: the numbers of offers, the offers, and which of them were clicked."""
    draw = torch.Generator().manual_seed(8)
    while True:
        sizes = torch.randint(6, 15, (count,), generator=draw).tolist()
        offers = sum(sizes)
        yield (
            sizes,
            torch.randint(2000, (offers, 1), generator=draw),
            torch.randn(offers, 20, generator=draw),
            (torch.rand(offers, generator=draw) < 0.15).float(),
        )


torch.set_num_threads(1)
ranker = Ranker()
optimizer = torch.optim.Adagrad(ranker.parameters(), lr=0.02)
began, warm = time.perf_counter(), None
for step, (sizes, hotels, features, clicks) in enumerate(searches(), start=1):
    loss = pairwise(ranker(hotels, features), clicks, sizes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
