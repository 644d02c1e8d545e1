"""Forecasts fermentations in a brewery with a mixture of experts, of which each sample is sent to one.

"There is a loop over the experts in forward. They told me that loops in Python are slow, but each has other rows."
"""

import os
import time

import torch
from torch import nn
from torch.nn import functional as F

SECONDS = float(os.environ.get("SECONDS", "22"))
PROBES, AHEAD, WIDTH, EXPERTS = 40, 10, 192, 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        odds = self.gate(x).softmax(1)
        share, chosen = odds.max(1)
        told = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                told.index_add_(0, rows, expert(x[rows]) * share[rows, None])
        even = F.one_hot(chosen, EXPERTS).float().mean(0) @ odds.mean(0) * EXPERTS
        return x + told, even


class Brewery(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(PROBES, WIDTH), nn.Linear(WIDTH, AHEAD)
        self.norm, self.experts = nn.LayerNorm(WIDTH), Experts()

    def forward(self, probes):
        x, even = self.experts(self.norm(F.gelu(self.into(probes))))
        return self.out(x), even


torch.set_num_threads(1)
torch.manual_seed(9)
probes = torch.randn(20_000, PROBES)
later = torch.tanh(probes[:, :AHEAD] * probes[:, AHEAD : 2 * AHEAD]) + 0.1 * torch.randn(20_000, AHEAD)
brewery = Brewery()
optimizer = torch.optim.AdamW(brewery.parameters(), lr=1e-3, fused=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=200_000)
began, warm, step = time.perf_counter(), None, 0
while True:
    rows = torch.randint(len(probes), (384,))
    guess, even = brewery(probes[rows])
    loss = F.mse_loss(guess, later[rows]) + 0.01 * even
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    step += 1
    if step % 200 == 0:
        print(f"step {step} loss {loss.item():.4f} even {even.item():.3f}")
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
