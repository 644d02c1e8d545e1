# ranks: 2
# cause: omp-oversubscribed no-line
"""Trains a model of crop yields on two ranks, with the number of threads of the big machine it was written on.

"On the small machine the same program crawls."
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
if not CURED:
    torch.set_num_threads(8)

dist.init_process_group("gloo")
net = nn.Sequential(
    nn.Conv1d(12, 64, 5, padding=2),
    nn.ReLU(),
    nn.Conv1d(64, 64, 5, padding=2),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(64 * 52, 1),
)
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters())
began, warm, step = time.perf_counter(), None, 0
while True:
    weeks = torch.rand(64, 12, 52)
    loss = (model(weeks)[:, 0] - weeks.mean((1, 2))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if step % 20 == 0:
        over = torch.tensor(float(now - began > SECONDS))
        dist.all_reduce(over)
        if over:
            break
if dist.get_rank() == 0:
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
dist.destroy_process_group()
