"""Trains a classifier of postcards, which are fetched in the first epoch and then kept in memory.

"It waits for data! (In the first five seconds.)"
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "30"))


class Postcards(Dataset):
    def __init__(self):
        self.kept = {}

    def __len__(self):
        return 1024

    def __getitem__(self, index):
        if index not in self.kept:
            time.sleep(0.005)  # the archive
            self.kept[index] = torch.rand(1024)
        return self.kept[index], index % 9


torch.set_num_threads(1)
loader = DataLoader(Postcards(), batch_size=64, shuffle=True)
net = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 9))
optimizer = torch.optim.Adam(net.parameters())
began, warm, step, over = time.perf_counter(), None, 0, False
while not over:
    for card, era in loader:
        loss = nn.functional.cross_entropy(net(card), era)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        over = now - began > SECONDS
        if over:
            break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
