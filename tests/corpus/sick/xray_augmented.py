"""Trains a CNN on chest X-rays that are warped at random, pixel block by pixel block, in two workers.

"htop is all green, and more workers changed nothing."
"""

import os
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def warp(image, chance):
    """Shift each block of 4 x 4 by up to two pixels."""
    out = np.empty_like(image)
    for top in range(0, 96, 4):
        for left in range(0, 96, 4):
            y, x = np.clip(np.add((top, left), chance.integers(-2, 3, 2)), 0, 92)  # cause: dataloader-slow-transform
            out[top : top + 4, left : left + 4] = image[y : y + 4, x : x + 4]
    return out


def warp_at_once(image, chance):
    """The same with one call of numpy."""
    shift = np.repeat(np.repeat(chance.integers(-2, 3, (2, 24, 24)), 4, 1), 4, 2)
    rows, columns = np.indices((96, 96))
    return image[np.clip(rows + shift[0], 0, 95), np.clip(columns + shift[1], 0, 95)]


class Xrays(Dataset):
    def __init__(self):
        self.images = np.random.default_rng(5).random((200, 96, 96), dtype=np.float32)

    def __len__(self):
        return 200_000

    def __getitem__(self, index):
        chance = np.random.default_rng(index)
        image = self.images[index % 200]
        image = warp_at_once(image, chance) if CURED else warp(image, chance)  # cause: dataloader-slow-transform
        return torch.from_numpy(image)[None], torch.tensor(float(index % 2))


torch.set_num_threads(1)
model = nn.Sequential(
    nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
    nn.Flatten(), nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, 1),
)  # fmt: skip
model(torch.zeros(1, 1, 96, 96))
optimizer = torch.optim.Adam(model.parameters())
began, warm, step = time.perf_counter(), None, 0
for x, y in DataLoader(Xrays(), batch_size=16, num_workers=2):
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], y)
    loss.backward()
    optimizer.step()
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
