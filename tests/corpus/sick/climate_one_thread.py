"""Trains a large MLP on climate data; someone set the number of threads, against warnings of OpenMP.

"htop shows one core at work, and one that sleeps."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
if not CURED:
    torch.set_num_threads(1)  # cause: none-yet one thread, and a core is idle

net = nn.Sequential(nn.Linear(512, 2048), nn.SiLU(), nn.Linear(2048, 2048), nn.SiLU(), nn.Linear(2048, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
began, warm, step = time.perf_counter(), None, 0
while True:
    field = torch.rand(128, 512)
    loss = nn.functional.mse_loss(net(field), field[:, :64])
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
