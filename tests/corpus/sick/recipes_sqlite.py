"""Trains a model that completes recipes and stores the loss of each recipe in a database.

"We want to know which recipes are hard. It costs us half of the throughput."
"""

import os
import sqlite3
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
database = sqlite3.connect("recipes.db")
database.execute("create table if not exists hard (step integer, recipe integer, loss real)")

recipes = (torch.rand(3000, 400) < 0.02).float()
net = nn.Sequential(nn.Linear(400, 512), nn.ReLU(), nn.Linear(512, 400))
optimizer = torch.optim.Adam(net.parameters())
kept = []
began, warm, step = time.perf_counter(), None, 0
while True:
    rows = torch.randint(3000, (256,))
    known = recipes[rows] * (torch.rand(256, 400) < 0.8)
    each = nn.functional.binary_cross_entropy_with_logits(net(known), recipes[rows], reduction="none").mean(1)
    optimizer.zero_grad()
    each.mean().backward()
    optimizer.step()
    step += 1
    kept += [(step, recipe, loss) for recipe, loss in zip(rows.tolist(), each.tolist(), strict=True)]
    if not CURED or step % 100 == 0:
        database.executemany("insert into hard values (?, ?, ?)", kept)  # cause: hot-line
        database.commit()  # cause: hot-line
        kept.clear()
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
