"""Classifies moths; a worker process crops, mirrors and dims the pictures while the main process computes.

"Everybody says that augmentation in numpy is slow, and my epochs are so short that the workers hardly get warm."
"""

import os
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))


class Moths(Dataset):
    def __init__(self, count=1_280):
        rng = np.random.default_rng(0)
        self.pictures = rng.integers(0, 256, (count, 48, 48, 3), dtype=np.uint8)
        self.kinds = rng.integers(0, 12, count)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, number):
        top, left = np.random.randint(0, 9, 2)
        picture = self.pictures[number, top : top + 40, left : left + 40]
        if np.random.rand() < 0.5:
            picture = picture[:, ::-1]
        picture = picture.astype(np.float32) * (np.random.uniform(0.7, 1.0) / 255)
        return np.ascontiguousarray(picture.transpose(2, 0, 1)), self.kinds[number]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(
        Moths(), batch_size=32, shuffle=True, drop_last=True, num_workers=1, persistent_workers=True, prefetch_factor=4
    )
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 32, 3, stride=2), nn.BatchNorm2d(32),
        nn.ReLU(), nn.Conv2d(32, 48, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(192, 12),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    began, warm, step, epoch, now = time.perf_counter(), None, 0, 0, 0.0
    while now - began < SECONDS:
        total = torch.zeros(())
        for pictures, kinds in loader:
            loss = nn.functional.cross_entropy(model(pictures), kinds, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 3:
                warm = step, now
            if now - began > SECONDS:
                break
        schedule.step()
        epoch += 1
        print(f"epoch {epoch} loss {total.item() / 40:.4f}", flush=True)
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
