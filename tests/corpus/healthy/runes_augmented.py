"""Trains a classifier of carved runes; a generator turns and blurs whole batches with torch, tqdm shows where it is.

"The bar prints ten times a second. That cannot be what takes the time, can it?"
"""

import os
import time

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

SECONDS = float(os.environ.get("SECONDS", "22"))


def batches(pictures, runes, size):
    """Endless batches, each turned, shifted and blurred at random."""
    kernel = torch.full((3, 1, 3, 3), 1 / 9)
    while True:
        for rows in torch.randperm(len(pictures)).split(size):
            x = pictures[rows].float() / 255
            angle, shift = 0.3 * torch.randn(len(x)), 0.1 * torch.randn(len(x), 2, 1)
            turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(-1, 2, 2)
            grid = F.affine_grid(torch.cat([turn, shift], 2), x.shape, align_corners=False)
            x = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
            x = F.conv2d(x, kernel, padding=1, groups=3)
            yield x + 0.05 * torch.randn_like(x), runes[rows]


def main():
    torch.set_num_threads(1)
    pictures = torch.randint(256, (4000, 3, 48, 48), dtype=torch.uint8)
    runes = torch.randint(24, (4000,))
    net = nn.Sequential(
        nn.Conv2d(3, 24, 5, stride=2, padding=2), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(48 * 36, 24),
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    began, warm = time.perf_counter(), None
    for step, (x, y) in enumerate(tqdm(batches(pictures, runes, 48)), start=1):
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
