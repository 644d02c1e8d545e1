"""Classifies scans of fossils; the scans are filtered by two helper processes before each step.

"I use both of my cores for the preparation, it ought to be quick!"
"""

import multiprocessing
import os
import time

import numpy as np
import torch
from scipy import ndimage
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def prepare(scan):
    scan = ndimage.gaussian_filter(scan, 1.0)
    edges = ndimage.sobel(scan)
    return np.stack([scan, edges]).astype(np.float32)


class Preparation:
    def __init__(self, processes=2):
        self.context = multiprocessing.get_context("fork")
        self.processes = processes
        self.pool = self.context.Pool(processes) if CURED else None

    def __call__(self, scans):
        if self.pool:
            prepared = self.pool.map(prepare, scans, chunksize=8)
        else:
            with self.context.Pool(self.processes) as pool:  # cause: hot-line
                prepared = pool.map(prepare, scans, chunksize=8)
        return torch.from_numpy(np.stack(prepared))

    def close(self):
        if self.pool:
            self.pool.terminate()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    scans = rng.random((500, 48, 48), dtype=np.float32)
    kinds = torch.randint(0, 7, (500,))
    preparation = Preparation()
    model = nn.Sequential(
        nn.Conv2d(2, 24, 5, stride=2), nn.ReLU(), nn.Conv2d(24, 48, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(48, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 7),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = rng.integers(0, 500, 32)
        batch = preparation([scans[row] for row in rows])  # cause: hot-line
        loss = nn.functional.cross_entropy(model(batch), kinds[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    preparation.close()
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
