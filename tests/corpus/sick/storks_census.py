"""Counts storks in pictures from a drone; the pictures are as large as the camera makes them, the network's are not.

"Batches are small, the net is small. I would have thought that a laptop does hundreds of pictures in a second."
"""

import os
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
CAMERA, SIDE, MOST = (540, 720), 64, 7


def fly(count, seed=17):
    g = torch.Generator().manual_seed(seed)
    pictures = torch.randint(60, 140, (count, 3, *CAMERA), dtype=torch.uint8, generator=g)
    storks = torch.randint(MOST + 1, (count,), generator=g)
    for picture, number in zip(pictures, storks.tolist(), strict=True):
        for _ in range(number):
            y, x = (torch.rand(2, generator=g) * torch.tensor([CAMERA[0] - 45, CAMERA[1] - 45])).long().tolist()
            picture[:, y : y + 39, x : x + 39] = 240
    return pictures, storks


def shrink(picture):
    small = F.interpolate(picture[None], size=(SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)
    return small[0]


class Census(Dataset):
    def __init__(self, count=120, train=True):
        self.pictures, self.storks = fly(count)
        self.train = train
        if CURED:
            self.pictures = torch.stack([shrink(picture) for picture in self.pictures])

    def __len__(self):
        return len(self.storks)

    def __getitem__(self, index):
        picture = self.pictures[index]
        if not CURED:
            picture = shrink(picture)  # cause: dataloader-too-few-workers or dataloader-slow-transform
        if self.train and torch.rand(()) < 0.5:
            picture = picture.flip(2)
        return picture.float() / 255, self.storks[index]


def counter():
    return nn.Sequential(
        nn.Conv2d(3, 24, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(24, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(48, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(1024, MOST + 1),
    )  # fmt: skip


def train(model, loader, optimizer):
    began, warm, step = time.perf_counter(), None, 0
    while True:
        for pictures, storks in loader:
            loss = F.cross_entropy(model(pictures), storks)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                return 1000 * (now - warm[1]) / (step - warm[0])
            if step % 200 == 0:
                print(f"step {step} loss {loss.item():.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(Census(), batch_size=12, shuffle=True, drop_last=True)
    model = counter()
    print(f"step_ms {train(model, loader, torch.optim.Adam(model.parameters(), lr=1e-3)):.3f}", flush=True)
