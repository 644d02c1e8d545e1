"""Classifies corrosion in pictures of pipes with a deep equilibrium model and Accelerate.

Its one layer is called until nothing changes.

"The same layer is called a dozen times, and after each of them it looks whether it may stop. Looks like a bug to me."
"""

import os
import time

import torch
from accelerate import Accelerator
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
SIDE, KINDS, WIDTH = 24, 7, 24


class Cell(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(2))
        with torch.no_grad():
            for conv in (self.first, self.second):
                conv.weight.mul_(0.3)

    def forward(self, z, x):
        y = self.norms[0](torch.relu(self.first(z)))
        return self.norms[1](torch.relu(z + x + self.second(y)))


class Equilibrium(nn.Module):
    """The gradient is that of the last calls only (a phantom gradient), the others need no graph."""

    def __init__(self, most=16, tolerance=6e-2, last=2):
        super().__init__()
        self.read = nn.Sequential(nn.Conv2d(3, WIDTH, 3, stride=2, padding=1), nn.GroupNorm(4, WIDTH), nn.ReLU())
        self.cell, self.head = Cell(), nn.Linear(WIDTH, KINDS)
        self.most, self.tolerance, self.last, self.calls = most, tolerance, last, 0

    def forward(self, picture):
        x = self.read(picture)
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(self.most):
                new = self.cell(z, x)
                self.calls += 1
                change = (new - z).norm() / new.norm()
                z = new
                if change < self.tolerance:
                    break
        for _ in range(self.last):
            z = self.cell(z, x)
        return self.head(z.mean((2, 3)))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    kinds = torch.randint(0, KINDS, (1000,))
    pictures = torch.rand(1000, 3, SIDE, SIDE)
    pictures[torch.arange(1000), :, kinds] += 1
    model = Equilibrium()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = torch.randint(len(kinds), (16,))
        loss = nn.functional.cross_entropy(model(pictures[rows]), kinds[rows])
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            calls = accelerator.unwrap_model(model).calls / step
            accelerator.print(f"{step} loss {loss.item():.3f} calls {calls:.1f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    accelerator.print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
