# ranks: 2
"""Trains a classifier of novels on two ranks, with gradients of four micro-batches, reduced with the last one.

"I want the mean loss of all ranks at each step; is one all_reduce more a problem?"
"""

import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
MICRO = 4

dist.init_process_group("gloo")
torch.set_num_threads(1)
body = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 16))
model = DistributedDataParallel(body)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
began, warm, step = time.perf_counter(), None, 0
while True:
    optimizer.zero_grad()
    mean = torch.zeros(())
    for micro in range(MICRO):
        with model.no_sync() if micro < MICRO - 1 else contextlib.nullcontext():
            x, y = torch.rand(64, 512), torch.randint(16, (64,))
            loss = nn.functional.cross_entropy(model(x), y) / MICRO
            loss.backward()
            mean += loss.detach()
    optimizer.step()
    dist.all_reduce(mean)
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
