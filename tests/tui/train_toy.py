"""Two hundred small steps, and a word on each stream."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

rank = int(os.environ["RANK"])
print(f"hello from rank {rank} \x1b[31m\x1b]0;title\x07", file=sys.stderr)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = DataLoader(TensorDataset(torch.randn(800, 64)), batch_size=4)
for (batch,) in data:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    time.sleep(0.01)
print(f"rank {rank} is done")
