"""Trains an MLP on songs; the sampler draws each genre as often as another one.

"There is nothing to load, it is all in memory, and still it waits for data."
"""

import os
import random
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
SONGS, BATCHES, SIZE = 400_000, 10, 2048


class Balanced(Sampler):
    def __init__(self, genres):
        self.genres = genres.tolist()

    def __len__(self):
        return BATCHES

    def __iter__(self):
        if CURED:
            order = torch.randperm(SONGS)
            yield from order[: BATCHES * SIZE].view(BATCHES, SIZE).tolist()
            return
        order = list(range(SONGS))
        random.shuffle(order)  # cause: hot-line
        order.sort(key=lambda song: self.genres[song])  # cause: hot-line
        stride = SONGS // (BATCHES * SIZE)
        drawn = order[::stride][: BATCHES * SIZE]
        for batch in range(BATCHES):
            yield drawn[batch::BATCHES]


class Batched(TensorDataset):
    def __getitems__(self, songs):
        return [each[torch.as_tensor(songs)] for each in self.tensors]


torch.set_num_threads(1)
genres = torch.randint(10, (SONGS,))
songs = Batched(torch.rand(SONGS, 64), genres)
loader = DataLoader(songs, batch_sampler=Balanced(genres), collate_fn=lambda batch: batch)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.Adam(net.parameters())
began, warm, step = time.perf_counter(), None, 0
while (now := time.perf_counter()) - began < SECONDS:
    for x, y in loader:
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    if warm is None and now - began > 2:
        warm = step, time.perf_counter()
print(f"step_ms {1000 * (time.perf_counter() - warm[1]) / (step - warm[0]):.3f}", flush=True)
