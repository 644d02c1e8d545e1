"""The real rank of benchmarks/load.py: a small network on one core, step after step, until it is ended."""

from __future__ import annotations

import os

import torch

os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # as in a job, also where all else is run before others
torch.set_num_threads(1)
torch.manual_seed(0)
inputs, targets = torch.randn(128, 256), torch.randint(0, 10, (128,))
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
loss = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
while True:
    optimizer.zero_grad()
    loss(model(inputs), targets).backward()
    optimizer.step()
