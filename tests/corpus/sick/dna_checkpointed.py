"""Trains a deep network on long stretches of DNA; the activations of its blocks are computed twice, to save memory.

"Forward runs twice, says the profiler."
"""

import os
import time

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Block(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.conv = nn.Conv1d(48, 48, 3, padding=dilation, dilation=dilation)
        self.norm = nn.GroupNorm(4, 48)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(4, 48, 1)
        self.blocks = nn.ModuleList(Block(2**n) for n in range(6))
        self.last = nn.Conv1d(48, 1, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if CURED else checkpoint(block, x, use_reentrant=False)
        return self.last(x)


torch.set_num_threads(1)
deep = Deep()
optimizer = torch.optim.AdamW(deep.parameters())
began, warm, step = time.perf_counter(), None, 0
while True:
    dna = nn.functional.one_hot(torch.randint(4, (4, 768)), 4).float().transpose(1, 2)
    loss = deep(dna).square().mean()
    optimizer.zero_grad()
    loss.backward()  # cause: hot-line
    optimizer.step()
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
