"""Finds pallets, crates and drums on depth images of a warehouse; one-stage grid detector.

"Taken over from the first prototype. There are never more than forty boxes on a picture, so a loop is fine,
and one can follow it in the debugger."
"""

import math
import os
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", 22))
CURED = os.environ.get("CURED") == "1"
GRID, SIZE, KINDS, MAX_BOXES = 12, 96, 3, 24


class WarehouseScenes(Dataset):
    def __init__(self, n=400, seed=5):
        g = torch.Generator().manual_seed(seed)
        self.boxes = torch.rand(n, MAX_BOXES, 4, generator=g) * torch.tensor([0.98, 0.98, 0.2, 0.2])
        self.boxes[..., 2:] += 0.05
        self.kinds = torch.randint(0, KINDS, (n, MAX_BOXES), generator=g)
        self.images = torch.randn(n, 1, SIZE, SIZE, generator=g) * 0.1
        for i in range(n):
            for (x, y, w, h), k in zip((self.boxes[i] * SIZE).int().tolist(), self.kinds[i].tolist(), strict=False):
                self.images[i, 0, y : y + h, x : x + w] += 0.3 * (k + 1)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.boxes[i], self.kinds[i]


class GridDetector(nn.Module):
    def __init__(self):
        super().__init__()
        layers, c = [], 1
        for out in (12, 24, 32):
            layers += [nn.Conv2d(c, out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out), nn.SiLU()]
            c = out
        self.trunk = nn.Sequential(*layers, nn.Conv2d(c, 32, 3, padding=1), nn.SiLU())
        self.head = nn.Conv2d(32, 5 + KINDS, 1)

    def forward(self, x):
        return self.head(self.trunk(x)).permute(0, 2, 3, 1)


def assign_by_box(boxes, kinds):
    target = torch.zeros(len(boxes), GRID, GRID, 5 + KINDS)
    for b in range(boxes.shape[0]):  # cause: hot-line
        for j in range(boxes.shape[1]):
            x, y = boxes[b, j, 0].item() * GRID, boxes[b, j, 1].item() * GRID  # cause: hot-line
            w, h = boxes[b, j, 2].item(), boxes[b, j, 3].item()  # cause: hot-line
            col, row = int(x), int(y)
            target[b, row, col, 0] = 1.0  # cause: hot-line
            target[b, row, col, 1] = x - col  # cause: hot-line
            target[b, row, col, 2] = y - row  # cause: hot-line
            target[b, row, col, 3] = math.log(w)  # cause: hot-line
            target[b, row, col, 4] = math.log(h)  # cause: hot-line
            target[b, row, col, 5:] = 0.0  # cause: hot-line
            target[b, row, col, 5 + kinds[b, j].item()] = 1.0  # cause: hot-line
    return target


def assign_at_once(boxes, kinds):
    target = torch.zeros(len(boxes), GRID, GRID, 5 + KINDS)
    place = boxes[..., :2] * GRID
    cell = place.long()
    rows = torch.cat(
        [torch.ones_like(place[..., :1]), place - cell, boxes[..., 2:].log(), F.one_hot(kinds, KINDS).float()], -1
    )
    target[torch.arange(len(boxes))[:, None], cell[..., 1], cell[..., 0]] = rows
    return target


def detection_loss(output, boxes, kinds):
    target = assign_at_once(boxes, kinds) if CURED else assign_by_box(boxes, kinds)
    hit = target[..., 0]
    objectness = F.binary_cross_entropy_with_logits(output[..., 0], hit)
    geometry = (F.smooth_l1_loss(output[..., 1:5], target[..., 1:5], reduction="none").sum(-1) * hit).sum() / hit.sum()
    kind = (
        F.cross_entropy(output[..., 5:].flatten(0, 2), target[..., 5:].flatten(0, 2), reduction="none") * hit.flatten()
    ).sum() / hit.sum()
    return objectness + geometry + kind


if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.manual_seed(0)
    loader = DataLoader(WarehouseScenes(), batch_size=16, shuffle=True, drop_last=True)
    model = GridDetector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    t, begin = [], time.perf_counter()
    while not t or t[-1] - begin < SECONDS:
        for images, boxes, kinds in loader:
            loss = detection_loss(model(images), boxes, kinds)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.append(time.perf_counter())
    t = t[len(t) // 10 :]
    print(f"loss {loss.item():.3f} step_ms {(t[-1] - t[0]) / (len(t) - 1) * 1e3:.3f}")
