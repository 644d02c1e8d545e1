"""Trains a classifier of mushrooms from a table of their features; rare kinds weigh more in the loss.

"The weights belong to the collection, so they are an attribute of it. Reading an attribute costs nothing."
"""

import os
import random
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
KINDS = 12


class Collection:
    def __init__(self, size=24_000):
        draw = random.Random(6)
        self.labels = [int(KINDS * draw.random() ** 2) for _ in range(size)]
        self.features = torch.randn(size, 60)
        self.targets = torch.tensor(self.labels)
        self._weights = None

    def share(self, kind):
        return sum(1.0 for label in self.labels if label == kind) / len(self.labels)  # cause: hot-line

    @property
    def weights(self):
        if self._weights is None or not CURED:
            self._weights = torch.tensor([1 / (KINDS * self.share(kind)) for kind in range(KINDS)])
        return self._weights

    def batches(self, size=256):
        while True:
            for rows in torch.randperm(len(self.labels)).split(size):
                yield self.features[rows], self.targets[rows]


def train():
    torch.set_num_threads(1)
    collection = Collection()
    model = nn.Sequential(
        nn.Linear(60, 448), nn.GELU(), nn.Linear(448, 448), nn.GELU(), nn.Dropout(0.2), nn.Linear(448, KINDS)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    began, warm = time.perf_counter(), None
    for step, (features, targets) in enumerate(collection.batches(), start=1):
        loss = nn.functional.cross_entropy(model(features), targets, weight=collection.weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


train()
