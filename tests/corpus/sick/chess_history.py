"""Trains an evaluation of chess positions and keeps the history for the plot in a JSON file.

"It begins fast and gets slower by the hour."
"""

import json
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class History:
    def __init__(self, path):
        self.path = path
        self.rows = [{"step": n, "loss": 1 / (n + 1), "lr": 1e-3} for n in range(3_000)]  # of the days before

    def add(self, **row):
        self.rows.append(row)
        if not CURED or len(self.rows) % 500 == 0:
            with open(self.path, "w") as file:
                json.dump(self.rows, file)  # cause: hot-line


torch.set_num_threads(1)
value = nn.Sequential(nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1), nn.Tanh())
optimizer = torch.optim.Adam(value.parameters(), lr=1e-3)
history = History("history.json")
boards = (torch.rand(10_000, 768) < 0.04).float()
began, warm, step = time.perf_counter(), None, 0
while True:
    rows = torch.randint(10_000, (512,))
    loss = value(boards[rows]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    history.add(step=step, loss=loss.item(), lr=1e-3)  # cause: hot-line
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
