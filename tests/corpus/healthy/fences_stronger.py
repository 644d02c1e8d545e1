"""Detects broken fences in drone pictures, split at random; augmentation becomes stronger from epoch to epoch.

"The workers have to start again each epoch, or they go on with the strength of the first one, which is none."
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

SECONDS = float(os.environ.get("SECONDS", "22"))


class Fences(Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(1)
        self.pictures = torch.randint(256, (800, 3, 40, 40), dtype=torch.uint8, generator=draw)
        self.broken = torch.randint(2, (800,), generator=draw)
        self.strength = 0.0

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        picture = self.pictures[index].float() / 255
        if self.strength:
            picture = picture * (1 + self.strength * torch.randn(3, 1, 1)) + self.strength * torch.randn(3, 1, 1)
            top, left = torch.randint(40, (2,)).tolist()
            side = int(20 * self.strength)
            picture[:, top : top + side, left : left + side] = 0.5
        return picture, self.broken[index]


def main():
    torch.set_num_threads(1)
    fences = Fences()
    train, held = random_split(fences, [640, 160])
    loader = DataLoader(train, batch_size=32, shuffle=True, num_workers=2)
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(48 * 25, 2),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    began, warm, step, epoch, now = time.perf_counter(), None, 0, 0, 0.0
    while now - began < SECONDS:
        fences.strength = min(0.5, epoch / 100)
        for picture, broken in loader:
            loss = nn.functional.cross_entropy(net(picture), broken)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            now = time.perf_counter()
            if now - began > SECONDS:
                break
        epoch += 1
        if epoch % 10 == 0:
            fences.strength = 0.0
            net.eval()
            with torch.no_grad():
                right = sum((net(x).argmax(1) == y).sum().item() for x, y in DataLoader(held, batch_size=80))
            net.train()
            print(f"epoch {epoch}: {right} of {len(held)}", flush=True)
        if warm is None and now - began > 2:
            warm = step, now
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
