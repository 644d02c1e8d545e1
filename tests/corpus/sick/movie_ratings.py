"""Trains a matrix factorisation of movie ratings, with ratings in a new order every few steps.

"The maths is nothing, so what does it do all the time?"
"""

import os
import random
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
PER_EPOCH, SIZE = 12, 8192

torch.set_num_threads(1)
ratings = [(random.randrange(20_000), random.randrange(5_000), random.random()) for _ in range(400_000)]
users, movies, stars = (torch.tensor(column) for column in zip(*ratings, strict=True))
order = list(range(len(ratings)))


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.movie = nn.Embedding(20_000, 32), nn.Embedding(5_000, 32)

    def forward(self, user, movie):
        return (self.user(user) * self.movie(movie)).sum(1)


factors = Factors()
optimizer = torch.optim.Adam(factors.parameters(), lr=0.01)
began, warm, step = time.perf_counter(), None, 0
while (now := time.perf_counter()) - began < SECONDS:
    if CURED:
        order = torch.randperm(len(ratings))
    else:
        random.shuffle(order)  # cause: hot-line
    for first in range(0, PER_EPOCH * SIZE, SIZE):
        rows = torch.as_tensor(order[first : first + SIZE])
        loss = (factors(users[rows], movies[rows]) - stars[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    if warm is None and time.perf_counter() - began > 2:
        warm = step, time.perf_counter()
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
