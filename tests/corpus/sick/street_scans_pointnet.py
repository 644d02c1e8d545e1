"""Tells street scenes apart from lidar sweeps with a small PointNet.

"The network sees a thousand points of each sweep and no more, so I thought it would not matter that the new sensor
returns twice as many of them. It does matter, and I cannot see why: nothing but indexing is done with the rest."
"""

import os
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
POINTS, SCENES, BATCH = 1024, 4, 16


def drive(sweeps=40, returns=120_000, seed=5):
    rng = np.random.default_rng(seed)
    scenes = rng.integers(0, SCENES, sweeps)
    clouds = []
    for scene in scenes:
        cloud = rng.standard_normal((returns, 4), dtype=np.float32)
        cloud[:, 2] *= 0.3 + 0.2 * scene
        clouds.append(cloud)
    return clouds, scenes


class Sweeps(Dataset):
    """Every sweep is drawn from several times an epoch, other points each time."""

    def __init__(self, clouds, scenes, views=16):
        self.clouds, self.scenes, self.views = clouds, scenes, views
        self.rng = np.random.default_rng(11)

    def __len__(self):
        return len(self.clouds) * self.views

    def __getitem__(self, index):
        index %= len(self.clouds)
        cloud = self.clouds[index]
        if CURED:
            chosen = self.rng.choice(len(cloud), POINTS, replace=False)
        else:
            chosen = np.random.choice(  # cause: dataloader-too-few-workers or dataloader-slow-transform
                len(cloud), POINTS, replace=False
            )
        return torch.from_numpy(cloud[chosen]), int(self.scenes[index])


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 128))
        self.all = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, SCENES))

    def forward(self, points):
        return self.all(self.each(points).amax(1))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    loader = DataLoader(  # cause: dataloader-too-few-workers or dataloader-slow-transform
        Sweeps(*drive()), batch_size=BATCH, shuffle=True, drop_last=True
    )
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began, warm, step, now = time.perf_counter(), None, 0, 0.0
    while now - began < SECONDS:
        for points, scenes in loader:
            loss = nn.functional.cross_entropy(model(points), scenes)
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


if __name__ == "__main__":
    main()
