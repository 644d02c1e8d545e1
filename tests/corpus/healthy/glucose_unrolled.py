"""Trains a recurrent model of glucose in blood, written by hand: each minute needs the one before.

"Hundreds of little operations, one after the other. Is this the loop that everybody warns of?"
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))


class Days(Dataset):
    def __init__(self):
        self.meals = torch.rand(2000, 60, 6)

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        meals = self.meals[index % 2000]
        return meals, meals.mean(1).cumsum(0) / 60


class Glucose(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.eats, self.lasts = nn.Parameter(0.1 * torch.randn(6, width)), nn.Parameter(0.1 * torch.randn(width, width))
        self.burns, self.read = nn.RNNCell(width, width), nn.Linear(width, 1)

    def forward(self, meals):
        level = burned = meals.new_zeros(len(meals), self.lasts.shape[0])
        levels = []
        for minute in range(meals.shape[1]):
            level = torch.tanh(meals[:, minute] @ self.eats + level @ self.lasts - 0.1 * burned)
            levels.append(level)
        states = torch.stack(levels, 1)
        for minute in range(0, meals.shape[1], 10):
            burned = self.burns(states[:, minute], burned)
        return self.read(states + burned[:, None])[..., 0]


torch.set_num_threads(1)
glucose = Glucose()
optimizer = torch.optim.Adam(glucose.parameters())
began, warm, step = time.perf_counter(), None, 0
for meals, measured in DataLoader(Days(), batch_size=32, num_workers=1):
    loss = nn.functional.mse_loss(glucose(meals), measured)
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.clamp_(-1, 1)
    optimizer.step()
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
