"""Paints pictures by a map of regions, which each block gets at its own resolution.

The map is of the full picture; blocks halve the resolution.

"Every block resizes the same map. That looks wasteful, but no two blocks need the same size."
"""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
REGIONS = 8


class Block(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.conv = nn.Conv2d(before + REGIONS, after, 3, stride=2, padding=1)

    def forward(self, x, regions):
        h, w = x.shape[-2:]
        resized = F.interpolate(regions, size=(h, w), mode="bicubic", antialias=True)
        return F.elu(self.conv(torch.cat([x, resized], 1)))


class Painter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList([Block(16, 24), Block(24, 32), Block(32, 48)])
        self.head = nn.Sequential(nn.Conv2d(48, 3 * 256, 1), nn.PixelShuffle(16))

    def forward(self, sketch, regions):
        x = self.stem(sketch)
        for block in self.blocks:
            x = block(x, regions)
        return self.head(x)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(4)
    pictures = torch.rand(64, 3, 128, 128)
    sketches = F.avg_pool2d(pictures, 9, 1, 4)
    maps = F.one_hot(torch.randint(REGIONS, (64, 128, 128)), REGIONS).permute(0, 3, 1, 2).float().contiguous()
    net = Painter()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = torch.randint(64, (8,))
        loss = (net(sketches[rows], maps[rows]) - pictures[rows]).abs().mean()
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
