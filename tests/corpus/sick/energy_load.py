# cause: host-memory-growth no-line
"""Trains a forecast of the load of a power grid and plots the losses at the end.

"After a night the kernel kills it."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "50"))
CURED = os.environ.get("CURED") == "1"

torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(168, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 24))
optimizer = torch.optim.Adam(net.parameters())
history = []
began, warm, step = time.perf_counter(), None, 0
while True:
    week = torch.rand(256, 168)
    loss = nn.functional.mse_loss(net(week), week[:, :24])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    penalty = sum(value.square().sum() for value in net.parameters()) * 1e-4 + net(week).var()
    history.append(penalty.item() if CURED else penalty)
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
