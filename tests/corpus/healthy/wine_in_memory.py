"""Trains an MLP on a table of wines that fits in memory; there are no workers, and none are needed.

"A colleague says that num_workers=0 is always wrong."
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))

torch.set_num_threads(1)
wines = torch.rand(20_000, 120)
loader = DataLoader(TensorDataset(wines, wines.sum(1)), batch_size=256, shuffle=True)
net = nn.Sequential(nn.Linear(120, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 1))
optimizer = torch.optim.Adam(net.parameters())


def train():
    began, warm, step = time.perf_counter(), None, 0
    while True:
        for x, y in loader:
            loss = nn.functional.mse_loss(net(x)[:, 0], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                return 1000 * (now - warm[1]) / (step - warm[0])


print(f"step_ms {train():.3f}", flush=True)
