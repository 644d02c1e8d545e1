"""Recognises otters by their whiskers; of each pool only the hardest photographs are learned from.

The pool is four times the batch, and its losses are those of the present weights: older ones mislead as soon as the
network has learned them.

"Every step runs two forward passes, the first over far more images than are trained on, and throws its result away. A
colleague says that this is a bug."
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
OTTERS, POOL, BATCH = 20, 96, 24


class Whiskers(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 5, 2, 2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 48, 3, 2, 1),
            nn.BatchNorm2d(48),
            nn.ReLU(),
        )
        self.otter = nn.Linear(48, OTTERS)

    def forward(self, photo):
        return self.otter(self.body(photo).mean((2, 3)))


def photographs(n=4800):
    g = torch.Generator().manual_seed(1)
    faces = torch.randn(OTTERS, 1, 32, 32, generator=g)
    otter = (torch.rand(n, generator=g).square() * OTTERS).long()
    photo = 0.6 * faces[otter] + torch.randn(n, 1, 32, 32, generator=g)
    return TensorDataset(photo, otter)


@torch.no_grad()
def hardest(model, photo, otter):
    model.eval()
    loss = nn.functional.cross_entropy(model(photo), otter, reduction="none")
    model.train()
    return loss.topk(BATCH).indices


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(photographs(), batch_size=POOL, shuffle=True, drop_last=True)
    model = Whiskers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step, mark, over, t0 = 0, None, False, time.perf_counter()
    while not over:
        for photo, otter in loader:
            rows = hardest(model, photo, otter)
            loss = nn.functional.cross_entropy(model(photo[rows]), otter[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 200 == 0:
                print(f"{step}: loss of the hardest {loss.item():.3f}", flush=True)
            now = time.perf_counter()
            if mark is None and now - t0 > 2:
                mark = step, now
            if now - t0 > SECONDS:
                over = True
                break
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
