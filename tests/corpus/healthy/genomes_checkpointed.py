"""Trains a deep network on long stretches of DNA; only what is cheap to compute is computed again in backward.

"The memory of the exponentials is back, and the step is as long as before."
"""

import os
import time

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

SECONDS = float(os.environ.get("SECONDS", "22"))


class Block(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.conv = nn.Conv1d(64, 64, 5, padding=2 * dilation, dilation=dilation)
        self.gain = nn.Parameter(torch.ones(64, 1))

    def bend(self, x):
        return self.gain * torch.tanh(x)

    def forward(self, x):
        return x + checkpoint(self.bend, self.conv(x), use_reentrant=False)


torch.set_num_threads(1)
deep = nn.Sequential(nn.Conv1d(4, 64, 1), *[Block(2**n) for n in range(5)], nn.Conv1d(64, 4, 1))
optimizer = torch.optim.AdamW(deep.parameters())
began, warm, step = time.perf_counter(), None, 0
while True:
    letters = torch.randint(4, (4, 768))
    known = nn.functional.one_hot(letters, 4).float().transpose(1, 2)
    loss = nn.functional.cross_entropy(deep(known * (torch.rand(4, 1, 768) > 0.2)), letters)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
