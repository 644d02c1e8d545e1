# ranks: 2
"""Trains a model of sea temperatures on two ranks that have the same to do.

"Is one of them slower?"
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))

dist.init_process_group("gloo")
sea = TensorDataset(torch.rand(4096, 1, 24, 24), torch.rand(4096))
sampler = DistributedSampler(sea)
loader = DataLoader(sea, batch_size=32, sampler=sampler)
net = nn.Sequential(
    nn.Conv2d(1, 32, 5), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 324, 1)
)
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters())


def train():
    began, warm, step = time.perf_counter(), None, 0
    for epoch in range(10_000):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x)[:, 0], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
        over = torch.tensor(float(now - began > SECONDS))
        dist.all_reduce(over)
        if over:
            break
    return 1000 * (now - warm[1]) / (step - warm[0])


step_ms = train()
if dist.get_rank() == 0:
    print(f"step_ms {step_ms:.3f}", flush=True)
dist.destroy_process_group()
