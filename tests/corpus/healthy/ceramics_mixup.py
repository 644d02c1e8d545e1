"""Trains a classifier of ceramics from a stream of photographs; one worker augments them and mixes pairs of them.

"The worker uses a third of a core or more, and I do the augmentation in Python. Is it too slow?"
"""

import itertools
import os
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SECONDS = float(os.environ.get("SECONDS", "22"))


class Photographs(IterableDataset):
    def __init__(self):
        self.photos = np.random.default_rng(0).integers(256, size=(200, 3, 56, 56), dtype=np.uint8)

    def augmented(self, photo, draw):
        top, left = draw.integers(8, size=2)
        photo = photo[:, top : top + 48, left : left + 48]
        if draw.random() < 0.5:
            photo = photo[:, :, ::-1]
        light = photo.astype(np.float32) * np.float32(draw.uniform(0.8, 1.2) / 255)
        return (light - light.mean()) / (light.std() + np.float32(1e-3))

    def __iter__(self):
        info = get_worker_info()
        draw = np.random.default_rng(info.seed if info else 1)
        for index in itertools.count():
            yield self.augmented(self.photos[index % 200], draw), index % 10


def mixed(samples):
    photos = torch.from_numpy(np.stack([photo for photo, _ in samples]))
    kinds = nn.functional.one_hot(torch.tensor([kind for _, kind in samples]), 10).float()
    share, order = float(np.random.beta(0.3, 0.3)), torch.randperm(len(samples))
    return torch.lerp(photos, photos[order], 1 - share), torch.lerp(kinds, kinds[order], 1 - share)


def main():
    torch.set_num_threads(1)
    loader = DataLoader(Photographs(), batch_size=32, num_workers=1, collate_fn=mixed, prefetch_factor=4)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2), nn.GELU(), nn.Conv2d(32, 64, 3), nn.GELU(), nn.Conv2d(64, 96, 3, stride=2),
        nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(96, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    began, warm = time.perf_counter(), None
    for step, (photos, kinds) in enumerate(loader, start=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(photos), kinds).backward()
        optimizer.step()
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
