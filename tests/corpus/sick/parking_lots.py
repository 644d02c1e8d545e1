"""Trains a detector of parked cars; its loss compares the boxes of each photograph one by one.

"GPU or CPU, it is equally slow, so I suppose the camera is."
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
SPACES = 12


class Lots(Dataset):
    """Photographs from a roof, and where the cars of a lot stand: left, top, width and height."""

    def __init__(self):
        self.photos = torch.rand(64, 3, 64, 64)
        self.corners, self.sizes = torch.rand(512, SPACES, 2), 0.1 + 0.2 * torch.rand(512, SPACES, 2)

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return self.photos[index % 64], torch.cat([self.corners[index % 512], self.sizes[index % 512]], 1)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, SPACES * 4)),
        )

    def forward(self, photos):
        return self.body(photos).sigmoid().unflatten(1, (SPACES, 4))


def overlap(one, other):
    """Intersection over union, of boxes of any number."""
    low = torch.maximum(one[..., :2], other[..., :2])
    high = torch.minimum(one[..., :2] + one[..., 2:], other[..., :2] + other[..., 2:])
    common = (high - low).clamp(min=0).prod(-1)
    return common / (one[..., 2:].prod(-1) + other[..., 2:].prod(-1) - common + 1e-6)


class BoxLoss(nn.Module):
    def of_photo(self, found, parked):
        total = found.new_zeros(())
        for box, car in zip(found, parked, strict=True):
            total = total + (1 - overlap(box, car)) + nn.functional.smooth_l1_loss(box, car)
        return total / len(found)

    def forward(self, found, parked):
        if CURED:
            return (1 - overlap(found, parked)).mean() + nn.functional.smooth_l1_loss(found, parked)
        losses = [self.of_photo(*pair) for pair in zip(found, parked, strict=True)]  # cause: small-operations-loop
        return torch.stack(losses).mean()


class Training:
    def __init__(self):
        self.detector, self.loss = Detector(), BoxLoss()
        self.optimizer = torch.optim.SGD(self.detector.parameters(), lr=0.01, momentum=0.9)
        self.loader = DataLoader(Lots(), batch_size=16, num_workers=1)

    def step(self, photos, parked):
        self.optimizer.zero_grad()
        loss = self.loss(self.detector(photos), parked)
        loss.backward()
        self.optimizer.step()

    def run(self):
        began, warm = time.perf_counter(), None
        for step, batch in enumerate(self.loader, start=1):
            self.step(*batch)
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                break
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Training().run()
