"""Trains a forecast of traffic and asks the system for its load, memory and disk, because the disk was full once.

"The overhead of monitoring is said to be small."
"""

import os
import subprocess
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def disk_free():
    command = ["sh", "-c", "uptime; free -m; df --output=avail ."]
    told = subprocess.run(command, capture_output=True, text=True)  # cause: hot-line
    return int(told.stdout.split()[-1])


torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(288, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 12))
optimizer = torch.optim.Adam(net.parameters())
roads = torch.rand(4000, 300)
began, warm, step, free = time.perf_counter(), None, 0, 0
while True:
    day = roads[torch.randint(4000, (256,))]
    loss = nn.functional.l1_loss(net(day[:, :288]), day[:, 288:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if not CURED or step % 200 == 0:
        free = disk_free()  # cause: hot-line
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f} free {free}", flush=True)
