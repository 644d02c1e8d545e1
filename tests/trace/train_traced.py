"""Trains with DDP on two CPUs until it is told to end: a file `stop` beside it."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
if "profiled" in sys.argv:
    with torch.profiler.profile():
        torch.ones(3).sum()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(512, 256), torch.randint(0, 8, (512,))), batch_size=64)
loss_of = nn.CrossEntropyLoss()
going = torch.ones(1)
steps = 0
while going.item():
    for inputs, targets in loader:
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    going.fill_(0.0 if os.path.exists("stop") else 1.0)
    torch.distributed.all_reduce(going, op=torch.distributed.ReduceOp.MIN)
    if steps == 8:
        print("training", flush=True)
if "fork" in sys.argv:  # a child that does not exec, and ends as a Python program ends
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
print(f"trained {steps} steps", flush=True)
