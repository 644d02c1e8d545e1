# cause: host-memory-growth no-line
"""Trains a classifier of bird song on random crops, which the dataset remembers, so that they are cut only once.

"The workers grow until the container is over its limit."
"""

import os
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "50"))
CURED = os.environ.get("CURED") == "1"


class Crops(Dataset):
    def __init__(self):
        self.song = np.random.default_rng(0).standard_normal(500_000).astype(np.float32)
        self.cut = {}

    def __len__(self):
        return 400_000

    def __getitem__(self, index):
        crop = self.cut.get(index)
        if crop is None:
            crop = np.roll(self.song[index : index + 8000], index)
            if not CURED:
                self.cut[index] = crop
        return crop[:8000], index % 30


if __name__ == "__main__":
    torch.set_num_threads(1)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 8000)), nn.Conv1d(1, 16, 64, 16), nn.ReLU(), nn.Conv1d(16, 32, 16, 8), nn.ReLU(),
        nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(128, 30),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters())
    began, warm, step = time.perf_counter(), None, 0
    for crop, bird in DataLoader(Crops(), batch_size=32, num_workers=1, shuffle=True):
        loss = nn.functional.cross_entropy(net(crop), bird)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
