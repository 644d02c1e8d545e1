# cause: frequent-validation no-line
"""Trains a CNN that sorts galaxies by shape and saves the best one by validation loss.

"Half of the log is validation."
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def validate(model, loader):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            total += nn.functional.cross_entropy(model(x), y).item()
    model.train()
    return total / len(loader)


def main():
    torch.set_num_threads(1)
    pictures, shapes = torch.rand(3000, 1, 40, 40), torch.randint(6, (3000,))
    train = DataLoader(TensorDataset(pictures, shapes), 32, shuffle=True)
    test = DataLoader(TensorDataset(pictures[:1280], shapes[:1280]), 64)
    model = nn.Sequential(
        nn.Conv2d(1, 24, 5), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(24, 32, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 64, 6),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    best, began, warm, step = 9.9, time.perf_counter(), None, 0
    every = 180 if CURED else 20  # about a tenth of the time, as is advised
    while True:
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            if step % every == 0:
                best = min(best, validate(model, test))
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
                return


if __name__ == "__main__":
    main()
