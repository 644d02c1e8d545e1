# ranks: 2
"""Trains a wide MLP on legal documents on two ranks, with gradients of four micro-batches.

"Accumulation was meant to save communication, but the network is as busy as before."
"""

import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
MICRO = 4

dist.init_process_group("gloo")
body = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16))
model = DistributedDataParallel(body)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
began, warm, step = time.perf_counter(), None, 0
while True:
    optimizer.zero_grad()
    for micro in range(MICRO):
        quiet = model.no_sync() if CURED and micro < MICRO - 1 else contextlib.nullcontext()
        with quiet:
            x, y = torch.rand(16, 1024), torch.randint(16, (16,))
            loss = nn.functional.cross_entropy(model(x), y) / MICRO
            loss.backward()  # cause: reduced-in-accumulation
    optimizer.step()
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if step % 10 == 0:
        over = torch.tensor(float(now - began > SECONDS))
        dist.all_reduce(over)
        if over:
            break
if dist.get_rank() == 0:
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
dist.destroy_process_group()
