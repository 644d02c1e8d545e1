"""Trains a counter of pollen on images of a microscope, whose background is removed before.

"Two workers, as the manual says. They load arrays that are in memory already, and cannot keep up."
"""

import os
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
SIZE, REACH = 96, 15
KERNEL = np.full(REACH, 1 / REACH, np.float32)


def smooth_rows(image):
    if CURED:
        total = np.pad(image, ((0, 0), (REACH // 2 + 1, REACH // 2))).cumsum(1)
        return (total[:, REACH:] - total[:, :-REACH]) / REACH
    rows = [np.convolve(row, KERNEL, mode="same") for row in image]  # cause: dataloader-slow-transform
    return np.stack(rows)


class Background:
    """What is left of an image that is smoothed in both directions."""

    def estimate(self, image):
        return smooth_rows(smooth_rows(image).T).T

    def remove(self, image):
        left = image - self.estimate(image)
        return (left - left.mean()) / (left.std() + 1e-3)


class Slides(Dataset):
    def __init__(self):
        self.images = np.random.default_rng(0).random((300, SIZE, SIZE), np.float32)
        self.background = Background()

    def __len__(self):
        return 200_000

    def __getitem__(self, index):
        image = self.images[index % 300]
        return torch.from_numpy(self.background.remove(image).astype(np.float32))[None], float(index % 7)


def main():
    torch.set_num_threads(1)
    loader = DataLoader(Slides(), batch_size=32, shuffle=True, num_workers=2)
    counter = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 1),
    )
    optimizer = torch.optim.Adam(counter.parameters(), 1e-3)
    began, warm = time.perf_counter(), None
    for step, (images, counts) in enumerate(loader, start=1):
        loss = nn.functional.poisson_nll_loss(counter(images).squeeze(1), counts.float())
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
