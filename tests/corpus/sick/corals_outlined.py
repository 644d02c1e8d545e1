"""Trains a network that draws outlines of corals; four views of each coral should have the same shape.

"The loss is school geometry with 24 points. Most of the time must be in the convolutions."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
VIEWS = 4


class Pencil(nn.Module):
    def __init__(self):
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(3, 24, 5, stride=2), nn.ReLU(), nn.Conv2d(24, 48, 3, stride=2), nn.ReLU(), nn.Flatten()
        )
        self.draw = nn.Linear(48 * 36, 48)

    def forward(self, photos):
        return self.draw(self.look(photos)).view(-1, 24, 2)


def loss_of(outlines, areas):
    if CURED:
        x, y = outlines.unbind(-1)
        area = 0.5 * (x * y.roll(-1, 1) - y * x.roll(-1, 1)).sum(1)
        first = outlines[::VIEWS].repeat_interleave(VIEWS, 0)
        return (nn.functional.smooth_l1_loss(area, areas) + (outlines - first).square().mean()) / 2
    total = torch.zeros(())
    for i in range(len(outlines)):  # cause: small-operations-loop
        x, y = outlines[i, :, 0], outlines[i, :, 1]
        area = 0.5 * (x * y.roll(-1) - y * x.roll(-1)).sum()
        first = outlines[i - i % VIEWS]
        total += nn.functional.smooth_l1_loss(area, areas[i]) + (outlines[i] - first).square().mean()
    return total / (2 * len(outlines))


def main():
    torch.set_num_threads(1)
    photos, areas = torch.randn(1200, 3, 30, 30), torch.rand(1200)
    pencil = Pencil()
    optimizer = torch.optim.Adam(pencil.parameters(), 1e-3)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        corals = torch.randint(1200 // VIEWS, (12, 1)) * VIEWS
        rows = (corals + torch.arange(VIEWS)).flatten()
        loss = loss_of(pencil(photos[rows]), areas[rows])
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
